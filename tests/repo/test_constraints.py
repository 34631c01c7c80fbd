"""The pinned versions can be installed together with the torch that people get, which is not the one that CI has.

Where an index offers a CPU build, torch requires no Triton, so a pin that the CUDA build contradicts goes unnoticed.
"""

import json
import platform
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
FACTS = Path(__file__).with_name("torch_requirements.txt")
ORDINARY_MACHINE = {
    "platform_system": "Linux",
    "sys_platform": "linux",
    "platform_machine": "x86_64",
    "python_version": "3.11",
    "python_full_version": "3.11.0",
}


def lines_of(path: Path) -> Iterator[str]:
    """Those that are no comments."""
    return (line for line in path.read_text().splitlines() if line and not line.startswith("#"))


def pins() -> dict[str, str]:
    """Versions by name."""
    pairs = (line.split("==") for line in lines_of(ROOT / "constraints.txt"))
    return {canonicalize_name(name): version for name, version in pairs}


def test_the_facts_are_of_the_torch_that_is_pinned() -> None:
    assert f"torch {pins()['torch']} requires" in FACTS.read_text()


def test_pins_are_what_torch_for_cuda_requires() -> None:
    """Regression: `triton==3.9.0` was pinned beside a torch that requires 3.7.1, so nothing could be installed."""
    pinned = pins()
    required = [Requirement(line) for line in lines_of(FACTS)]
    wanted = [each for each in required if each.marker is None or each.marker.evaluate(ORDINARY_MACHINE)]
    assert "triton" in {each.name for each in wanted}
    assert not [
        f"{each} is required, {each.name}=={pinned[name]} is pinned"
        for each in wanted
        if (name := canonicalize_name(each.name)) in pinned and not each.specifier.contains(pinned[name])
    ]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(
    (sys.platform, platform.machine()) != ("linux", "x86_64"),
    reason="the constraints are of Linux on x86_64; other machines get other builds",
)
def test_the_facts_are_those_of_the_wheel(tmp_path: Path) -> None:
    """Reads the wheel's metadata alone, by range requests of a newer pip than Python brings."""
    venv.create(tmp_path / "venv", with_pip=True)
    install = [str(tmp_path / "venv" / "bin" / "pip"), "install", "--quiet", "--retries", "1"]
    newer = subprocess.run([*install, "--upgrade", "pip"], capture_output=True, text=True, check=False)
    if newer.returncode != 0:
        pytest.skip(f"no package index answers: {newer.stderr.strip().splitlines()[-1]}")
    flags = ["--dry-run", "--ignore-installed", "--no-deps", "--use-feature=fast-deps", "--report", "-"]
    wheel = f"torch==={pins()['torch']}"  # NOTE: `==` would do with a CPU build
    done = subprocess.run([*install, *flags, wheel], capture_output=True, text=True, check=True)
    (installed,) = json.loads(done.stdout)["install"]
    found = sorted(line for line in installed["metadata"]["requires_dist"] if "extra ==" not in line)
    assert found == list(lines_of(FACTS)), "write them into torch_requirements.txt"
