"""A Debian base image with Python, made from packages where no registry offers one.

It stands for `python:3.11-slim-bookworm`: the same Debian, the same Python minor version, no documentation.
"""

import tempfile
from pathlib import Path

from tools.images.command import CommandError, run
from tools.images.host import buildah, state_dir

SUITE = "bookworm"
BASE = f"localhost/tandem-base:{SUITE}"
_INCLUDED = "python3,python3-venv,ca-certificates"
_LEFT_OUT = ("/usr/share/man/*", "/usr/share/locale/*", "/usr/share/doc/*", "/usr/share/info/*")


def ensure_base() -> str:
    """The base image's name; made once, which takes a minute or two.

    Raises:
        CommandError: Debian's archive cannot be reached, or a tool failed.
    """
    if not exists(BASE):
        with tempfile.TemporaryDirectory(dir=state_dir()) as scratch:
            _make(Path(scratch) / "base.tar")
    return BASE


def exists(image: str) -> bool:
    """Whether that image is here."""
    try:
        buildah("inspect", "--type", "image", "--format", "{{.FromImageID}}", image)
    except CommandError:
        return False
    return True


def _make(archive: Path) -> None:
    excludes = [f"--dpkgopt=path-exclude={pattern}" for pattern in _LEFT_OUT]
    run(
        ["mmdebstrap", "--variant=minbase", f"--include={_INCLUDED}", *excludes, SUITE, str(archive)],
        timeout_s=900,
    )
    container = buildah("from", "scratch")
    try:
        buildah("add", container, str(archive), "/", timeout_s=300)
        buildah("config", "--cmd", "python3", "--env", "LANG=C.UTF-8", container)
        buildah("commit", "--format", "docker", container, BASE, timeout_s=300)
    finally:
        buildah("rm", container)
