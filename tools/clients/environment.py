"""A virtual environment for a group of clients: made once, made anew when its pinned requirements change."""

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

_INSTALL_TIMEOUT_S = 1800
_SHOWN_LINES = 4


class InstallError(Exception):
    """A client cannot be installed; the message is the installer's."""


def prepare(group: str, requirements: Path, directory: Path) -> Path:
    """The interpreter of the environment in `directory`, which is made where it is missing or out of date.

    What stands in `GROUP.bare.txt` beside the requirements is installed without its dependencies.

    Raises:
        InstallError: what the installer says.
    """
    bare = requirements.with_suffix(".bare.txt")
    mark, digest = directory / ".installed", digest_of(requirements)
    python = directory / "bin" / "python"
    if mark.exists() and mark.read_text() == digest and python.exists():
        return python
    shutil.rmtree(directory, ignore_errors=True)
    _run([sys.executable, "-m", "venv", str(directory)], group)
    _run([str(python), "-m", "pip", "install", "--quiet", "-r", str(requirements)], group)
    if bare.exists():
        _run([str(python), "-m", "pip", "install", "--quiet", "--no-deps", "-r", str(bare)], group)
    mark.write_text(digest)
    return python


def digest_of(requirements: Path) -> str:
    """Names what these requirements, and those installed without dependencies, ask for."""
    bare = requirements.with_suffix(".bare.txt")
    return hashlib.sha256(requirements.read_bytes() + (bare.read_bytes() if bare.exists() else b"")).hexdigest()


def _run(command: list[str], group: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_INSTALL_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise InstallError(f"{group} is not installed after {_INSTALL_TIMEOUT_S} s") from error
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip() and not line.startswith("WARNING")]
        raise InstallError(f"{group} cannot be installed: {' '.join(said[-_SHOWN_LINES:]) or done.stdout[-500:]}")
