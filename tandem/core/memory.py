"""Memory available to this process: that of the system, or a control group's limit if lower."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import psutil

CPU_KV_CACHE_BYTES = 4 << 30  # the most by default
CPU_MEMORY_SHARE = 0.4  # of the available memory, for KV by default
_ROOT = Path("/")
_V2 = ("memory.max", "memory.current", "inactive_file")
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def default_cpu_kv_bytes(num_workers: int = 1) -> int:
    """KV memory in bytes of each of `num_workers` that start together: a share of what is available, at most 4 GiB."""
    return min(CPU_KV_CACHE_BYTES, int(available_bytes() * CPU_MEMORY_SHARE) // num_workers)


def available_bytes() -> int:
    """Bytes that can be allocated now without swapping or being killed."""
    return max(0, min([psutil.virtual_memory().available, *(limit - used for limit, used in _limits(_ROOT))]))


def total_bytes() -> int:
    """Bytes that would be available without other processes."""
    return min([psutil.virtual_memory().total, *(limit for limit, _ in _limits(_ROOT))])


def _limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yields (limit, used) in bytes of each enclosing control group that has a limit; used excludes cached files."""
    for group, (limit_name, used_name, cached_name) in _groups(root):
        with contextlib.suppress(OSError, ValueError, KeyError):  # no limit, "max", or a group out of sight
            limit = int((group / limit_name).read_text())
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            yield limit, int((group / used_name).read_text()) - int(stat[cached_name])


def _groups(root: Path) -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """Yields this process's control groups and their parents; in a container the mount root may be its own group."""
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            number, controllers, path = line.split(":", 2)
            if number != "0" and "memory" not in controllers.split(","):
                continue
            mount, names = (root / "sys/fs/cgroup", _V2) if number == "0" else (root / "sys/fs/cgroup/memory", _V1)
            group = Path(path.lstrip("/"))
            for part in (group, *group.parents):
                yield mount / part, names
