"""Other releases of Tandem for tests: the wheel of an earlier commit, and a copy of this tree that speaks more.

Both are directories for `PYTHONPATH` that share this environment's dependencies. Nothing is fetched.
"""

import shutil
import subprocess
import sys
import tarfile
from io import BytesIO
from pathlib import Path

import pytest

from tandem.core.hashing import HASH_VERSION
from tandem.rpc.compile import compile_protos
from tandem.rpc.protocols import PROTOCOL_VERSION
from tests.helpers.cluster import ROOT

PREVIOUS = (ROOT / "tests" / "skew" / "previous_release").read_text().strip()
BEFORE_SESSIONS = "e285976"  # the last commit that speaks protocol 1
_IN_WHEEL = ("tandem", "services", "proto", "pyproject.toml", "README.md", "LICENSE")
_RANGE = f"PROTOCOL_VERSION = {PROTOCOL_VERSION}\n", f"PROTOCOL_VERSION = {PROTOCOL_VERSION + 1}\n"
_SENT = "            return self.put(value).SerializeToString()\n"
_SENT_WITH_MORE = _SENT.rstrip("\n") + ' + b"\\xc2\\x3e\\x04more"\n'  # field 1000, a string


def source_of(commit: str, directory: Path) -> Path:
    """The tree of a commit, from git's history; skips the test where that is not here."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("an earlier release is built from git's history, and this tree is not a git checkout")
    done = subprocess.run(["git", "archive", commit, *_IN_WHEEL], cwd=ROOT, capture_output=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"commit {commit} is not in this clone's history: {done.stderr.decode(errors='replace').strip()}")
    with tarfile.open(fileobj=BytesIO(done.stdout)) as archive:
        archive.extractall(directory, filter="data")
    return directory


def installed(commit: str, directory: Path) -> Path:
    """The wheel of a commit, installed without its dependencies; skips the test as `source_of` does."""
    source = source_of(commit, directory / "source")
    compile_protos(source)
    wheels = directory / "wheels"
    offline = ("--quiet", "--disable-pip-version-check", "--no-index", "--no-deps")
    _pip("wheel", *offline, "--no-build-isolation", "--wheel-dir", wheels, source)
    (wheel,) = wheels.glob("tandem-*.whl")
    _pip("install", *offline, "--no-compile", "--target", directory / "installed", wheel)
    return directory / "installed"


def next_release(directory: Path, *, with_other_hashes: bool = False) -> Path:
    """A copy of this tree that speaks one protocol more, and sends a field that we do not know in every message."""
    for name in ("tandem", "services", "proto"):
        shutil.copytree(ROOT / name, directory / name, ignore=shutil.ignore_patterns("__pycache__"))
    _replace(directory / "tandem" / "rpc" / "protocols.py", *_RANGE)
    _replace(directory / "tandem" / "rpc" / "form.py", _SENT, _SENT_WITH_MORE)
    if with_other_hashes:
        _replace(directory / "tandem" / "core" / "hashing.py", f"HASH_VERSION = {HASH_VERSION}", "HASH_VERSION = 1000")
    return directory


def _replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1, f"{path} has {text.count(old)} of {old!r}"
    path.write_text(text.replace(old, new))


def _pip(*arguments: object) -> None:
    command = [sys.executable, "-m", "pip", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
