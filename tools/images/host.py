"""The machine's container tools and how ours are told to run: own storage, runc, cgroupfs, netavark.

The configuration is our own file, named by an environment variable, so the user's podman stays as it is.
"""

import os
import resource
import shutil
from pathlib import Path

from tools.images.command import CommandError, run

PACKAGES = ("buildah", "podman", "runc", "netavark", "aardvark-dns", "mmdebstrap", "iptables", "iproute2")
_PROGRAMS = ("buildah", "podman", "runc", "mmdebstrap", "iptables", "ip")
_HELPERS = tuple(Path("/usr/lib/podman") / name for name in ("netavark", "aardvark-dns"))

_CONTAINERS = """\
[containers]
default_ulimits = [{ulimits}]
log_driver = "k8s-file"
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "runc"
[network]
network_backend = "netavark"
"""
_STORAGE = """\
[storage]
driver = "overlay"
graphroot = "{state}/storage"
runroot = "/run/tandem-containers"
"""


def state_dir() -> Path:
    """Folder of images, containers and our configuration; `TANDEM_CONTAINERS_DIR` moves it."""
    return Path(os.environ.get("TANDEM_CONTAINERS_DIR") or Path.home() / ".cache" / "tandem" / "containers")


def missing_tools() -> list[str]:
    """Programs that must be installed before anything else here works, by name."""
    programs = [name for name in _PROGRAMS if shutil.which(name) is None]
    return programs + [path.name for path in _HELPERS if not path.exists()]


def ensure_tools() -> None:
    """Install what is missing.

    Raises:
        CommandError: we may not install here, or installing failed; the message names the packages.
    """
    missing = missing_tools()
    if not missing:
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise CommandError(f"{', '.join(missing)} missing; as root: apt-get install {' '.join(PACKAGES)}")
    run(["apt-get", "update", "-qq"], timeout_s=300)
    run(["apt-get", "install", "-y", "-qq", "--no-install-recommends", *PACKAGES], timeout_s=900)
    if missing := missing_tools():
        raise CommandError(f"{', '.join(missing)} still missing after installing {' '.join(PACKAGES)}")


def environment() -> dict[str, str]:
    """Ours, with podman and buildah pointed at our configuration."""
    directory = state_dir()
    directory.mkdir(parents=True, exist_ok=True)
    containers, storage = directory / "containers.conf", directory / "storage.conf"
    _write(containers, _CONTAINERS.format(ulimits=_ulimits()))
    _write(storage, _STORAGE.format(state=directory))
    ours = {"CONTAINERS_CONF": str(containers), "CONTAINERS_STORAGE_CONF": str(storage)}
    # NOTE: podman would have systemd ask for containers' health, which is not everywhere; `Container.is_healthy` asks
    return {**os.environ, **ours, "DISABLE_HC_SYSTEMD": "true"}


def podman(*arguments: str, timeout_s: float = 60.0, with_errors: bool = False) -> str:
    """Output of podman.

    Raises:
        CommandError: it failed, with its words.
    """
    return run(["podman", *arguments], env=environment(), timeout_s=timeout_s, with_errors=with_errors)


def buildah(*arguments: str, timeout_s: float = 60.0, log: str | None = None) -> str:
    """Output of buildah, or "" when it goes to `log`.

    Raises:
        CommandError: it failed, with its words.
    """
    return run(["buildah", *arguments], env=environment(), timeout_s=timeout_s, log=log)


def _ulimits() -> str:
    """NOTE: podman asks for more than this machine's hard limits by default, and runc may be refused them."""
    limits = {"nofile": (resource.RLIMIT_NOFILE, 65536), "nproc": (resource.RLIMIT_NPROC, 32768)}
    allowed = {name: (resource.getrlimit(kind)[1], most) for name, (kind, most) in limits.items()}
    least = {
        name: most if hard == resource.RLIM_INFINITY else min(hard, most) for name, (hard, most) in allowed.items()
    }
    return ", ".join(f'"{name}={limit}:{limit}"' for name, limit in least.items())


def _write(path: Path, text: str) -> None:
    if not path.exists() or path.read_text() != text:
        path.write_text(text)
