"""Inputs of the images, as far as they can be checked without building."""

import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ROOT / "docker" / "triton_packages.py"


def packages_of(python: Path | str) -> list[str]:
    return subprocess.run([python, str(PACKAGES)], capture_output=True, text=True, check=True).stdout.split()


def test_a_worker_with_triton_gets_a_c_compiler_and_one_without_gets_none(tmp_path: Path) -> None:
    """Regression: Triton compiles when it runs, and the image for GPUs had no compiler unless the builder knew."""
    pytest.importorskip("triton", reason="triton, whose packages are found, is not installed")
    assert packages_of(sys.executable)[:2] == ["gcc", "libc6-dev"]
    venv.create(tmp_path / "bare")
    assert packages_of(tmp_path / "bare" / "bin" / "python") == []


def test_the_worker_image_installs_those_packages() -> None:
    lines = (ROOT / "docker" / "worker.Dockerfile").read_text().replace("\\\n", " ")
    final = lines[lines.rindex("\nFROM ") :]
    assert "python3 /opt/build/triton_packages.py > /opt/triton-packages" in lines
    copied = r"\nCOPY --from=dependencies /opt/triton-packages (\S+)\n"
    assert re.search(rf"{copied}[\s\S]*\nRUN .*\$\(cat \1\).*apt-get install", final)


@pytest.mark.parametrize("dockerfile", sorted((ROOT / "docker").glob("*.Dockerfile")), ids=lambda path: path.stem)
def test_what_is_copied_is_sent_to_the_builder(dockerfile: Path) -> None:
    """`.dockerignore` leaves everything out that it does not name."""
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = [
        name
        for line in dockerfile.read_text().splitlines()
        if line.startswith("COPY ") and "--from" not in line
        for name in line.split()[1:-1]
        if not name.startswith("--")
    ]
    assert copied
    assert [name for name in copied if not any(name.rstrip("/").startswith(each) for each in sent)] == []
    assert all((ROOT / name).exists() for name in copied)
