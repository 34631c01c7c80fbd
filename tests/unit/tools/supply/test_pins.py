"""Pins are read as pip reads them, and what is no pin is refused."""

from pathlib import Path

import pytest
from packaging.version import Version

from tools.supply.pins import CONSTRAINTS, read_pins


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_names_markers_and_hashes(tmp_path: Path) -> None:
    text = (
        "# written by something\n"
        "Jinja2==3.1.6 \\\n    --hash=sha256:aa \\\n    --hash=sha256:bb\n"
        "    # via torch\n"
        "torch==2.13.0+cpu ; sys_platform == 'linux' \\\n    --hash=sha256:cc\n"
    )
    jinja, torch = read_pins(write(tmp_path / "a.lock", text))
    assert (jinja.name, jinja.version, jinja.marker, jinja.hashes) == (
        "jinja2",
        Version("3.1.6"),
        None,
        ("sha256:aa", "sha256:bb"),
    )
    assert (torch.version.local, str(torch.marker), torch.hashes) == (
        "cpu",
        'sys_platform == "linux"',
        ("sha256:cc",),
    )


@pytest.mark.parametrize("line", ["torch", "torch>=2", "torch==2.*", "torch>=2,<3", "-r other.txt", "not a name==1"])
def test_what_is_no_pin_is_named(tmp_path: Path, line: str) -> None:
    with pytest.raises(ValueError, match=r"is no pin; write name==version"):
        read_pins(write(tmp_path / "a.txt", f"numpy==2.4.6\n{line}\n"))


def test_the_constraints_are_pins() -> None:
    assert {"torch", "pydantic-core"} <= {pin.name for pin in read_pins(CONSTRAINTS)}
