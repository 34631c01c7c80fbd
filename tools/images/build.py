"""Builds the images from the Dockerfiles of `docker/`, layer by layer from the cache where nothing has changed."""

import tempfile
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from tools.images.base import ensure_base
from tools.images.command import CommandError, run
from tools.images.host import buildah, ensure_tools, podman, state_dir
from tools.images.pip_access import pip_access

ROOT = Path(__file__).parents[2]
TAG = "dev"
_ARGUMENTS = {"worker": ("LOCK=requirements/worker-cpu.lock",)}
_BUILD_TIMEOUT_S = 3600.0


@dataclass(frozen=True, slots=True)
class Images:
    """Names to run: the base, both of ours, and a Redis for tests."""

    base: str
    control: str
    worker: str
    redis: str


def build_images(tag: str = TAG, log: Path | None = None) -> Images:
    """Bring every image up to date with this checkout; installs the tools first where it may.

    Args:
        log: file for what the build prints; default: `build.log` beside the images.

    Raises:
        CommandError: a tool is missing or failed; the message ends with its words.
    """
    ensure_tools()
    base = ensure_base()
    log = log or state_dir() / "build.log"
    log.write_text("")
    recipes = {
        "control": ROOT / "docker" / "control.Dockerfile",
        "worker": ROOT / "docker" / "worker.Dockerfile",
        "redis": ROOT / "tools" / "images" / "redis.Dockerfile",
    }
    names = {name: f"localhost/tandem-{name}:{tag}" for name in recipes}
    for name, dockerfile in recipes.items():
        _build(dockerfile, names[name], base, log, _ARGUMENTS.get(name, ()))
    return Images(base, **names)


def sizes(images: Images) -> dict[str, int]:
    """Bytes of each image, shared layers counted in each."""
    return {name: int(podman("image", "inspect", "--format", "{{.Size}}", name)) for name in astuple(images)}


def _build(dockerfile: Path, name: str, base: str, log: Path, arguments: Sequence[str]) -> None:
    with tempfile.TemporaryDirectory(dir=state_dir()) as scratch:
        access = pip_access().arguments(Path(scratch))
        buildah(
            *("build", "--isolation", "chroot", "--format", "docker", "--layers"),
            *("--build-arg", f"BASE_IMAGE={base}", "--build-arg", f"REVISION={_revision()}"),
            *(word for argument in arguments for word in ("--build-arg", argument)),
            *access,
            *("--file", str(dockerfile), "--tag", name, str(ROOT)),
            timeout_s=_BUILD_TIMEOUT_S,
            log=str(log),
        )


def _revision() -> str:
    """The commit, as far as this is a clone."""
    try:
        return run(["git", "-C", str(ROOT), "rev-parse", "HEAD"])
    except CommandError:
        return "unknown"
