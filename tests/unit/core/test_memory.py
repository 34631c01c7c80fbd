"""Memory that a process may take, with a machine and control groups made up of files."""

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from tandem.core import memory

GIB = 1 << 30
V2 = {"memory.max": str(4 * GIB), "memory.current": str(3 * GIB), "memory.stat": f"anon 5\ninactive_file {GIB}\n"}
V1 = {
    "memory.limit_in_bytes": str(4 * GIB),
    "memory.usage_in_bytes": str(3 * GIB),
    "memory.stat": f"inactive_file 0\ntotal_inactive_file {GIB}\n",
}


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of 20 GiB of which 10 are available."""
    (tmp_path / "proc/self").mkdir(parents=True)
    monkeypatch.setattr(memory, "_ROOT", tmp_path)
    machine = SimpleNamespace(available=10 * GIB, total=20 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: machine)
    return tmp_path


def be_in(root: Path, line: str) -> None:
    (root / "proc/self/cgroup").write_text(f"7:cpu,cpuacct:/elsewhere\n{line}\n")


def write(directory: Path, files: dict[str, str]) -> None:
    directory.mkdir(parents=True)
    for name, text in files.items():
        (directory / name).write_text(text)


@pytest.mark.parametrize(
    ("line", "directory", "files"),
    [
        ("0::/", "sys/fs/cgroup", V2),
        ("0::/a/b", "sys/fs/cgroup/a", V2),
        ("4:memory:/a", "sys/fs/cgroup/memory/a", V1),
        ("4:hugetlb,memory:/unseen/a", "sys/fs/cgroup/memory", V1),
    ],
)
def test_a_limit_around_us_counts_without_cached_files(
    root: Path, line: str, directory: str, files: dict[str, str]
) -> None:
    be_in(root, line)
    write(root / directory, files)
    assert (memory.available_bytes(), memory.total_bytes()) == (2 * GIB, 4 * GIB)
    write(root / "sys/fs/cgroup/unrelated", files | {next(iter(files)): "0"})
    assert memory.available_bytes() == 2 * GIB


@pytest.mark.parametrize("files", [{}, V2 | {"memory.max": "max"}, V2 | {"memory.stat": ""}])
def test_without_a_limit_that_can_be_read_the_machine_counts(root: Path, files: dict[str, str]) -> None:
    assert memory.available_bytes() == 10 * GIB
    be_in(root, "0::/")
    write(root / "sys/fs/cgroup", files)
    assert (memory.available_bytes(), memory.total_bytes()) == (10 * GIB, 20 * GIB)


def test_a_limit_that_is_passed_leaves_nothing(root: Path) -> None:
    be_in(root, "0::/")
    write(root / "sys/fs/cgroup", V2 | {"memory.current": str(6 * GIB)})
    assert memory.available_bytes() == memory.default_cpu_kv_bytes() == 0


def test_workers_take_the_share_of_one_together() -> None:
    assert memory.default_cpu_kv_bytes() == memory.default_cpu_kv_bytes(1) == 4 * GIB
    assert memory.default_cpu_kv_bytes(4) == GIB
