"""Requests of huge pages for weights: a decode step reads all weights, which is faster from huge pages.

Files stay in the page cache, shared by all processes. Everything here is a hint: if the kernel or the file system has
no huge pages, nothing changes but the speed. It must never change the content of a file or a tensor.
"""

import ctypes
import mmap
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

PIECE_BYTES = 64 << 20  # read at a time
LEAST_BYTES = 8 << 20  # smaller files and tensors are left as they are
LEAST_BYTES_PER_S = 200e6  # a file read more slowly is left to be read on use
_ENOUGH = 0.75  # share of a piece that must be in huge pages; its ends may share one with other data
_MADV_POPULATE_READ = 22  # NOTE: Python's mmap does not name it yet


def cache_in_huge_pages(path: Path, clock: Callable[[], float] = time.monotonic) -> int:
    """Reads the file into the page cache in huge pages; returns the bytes of the pieces that are in huge pages
    afterwards.

    A piece that is cached in small pages is dropped and read again; the kernel drops only pages that are not mapped. It
    stops after the first piece that comes back in small pages, or slower than `LEAST_BYTES_PER_S`. A file that cannot
    be read is left to the process that opens it next.
    """
    done = 0
    with suppress(OSError, AttributeError), path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < LEAST_BYTES:
            return 0
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapping:
            mapping.madvise(mmap.MADV_HUGEPAGE)
            for start in range(0, size - LEAST_BYTES + 1, PIECE_BYTES):
                length = min(PIECE_BYTES, size - start)
                if not _is_read_hugely(mapping, start, length, path):
                    os.posix_fadvise(file.fileno(), start, length, os.POSIX_FADV_DONTNEED)
                    started_s = clock()
                    if not _is_read_hugely(mapping, start, length, path):
                        break
                    if clock() - started_s > length / LEAST_BYTES_PER_S:
                        return done + length
                done += length
    return done


def advise_huge_pages(tensor: torch.Tensor) -> None:
    """Requests huge pages for the tensor's whole storage, for memory that is read or written afterwards."""
    storage = tensor.untyped_storage()
    if storage.nbytes() < LEAST_BYTES or tensor.device.type != "cpu" or not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    first = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (storage.data_ptr() + storage.nbytes() - first) // mmap.PAGESIZE * mmap.PAGESIZE
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), ctypes.c_int(mmap.MADV_HUGEPAGE))


def _is_read_hugely(mapping: mmap.mmap, start: int, length: int, path: Path) -> bool:
    """Reads a piece and releases it. Returns whether most of it was in huge pages."""
    mapping.madvise(_MADV_POPULATE_READ, start, length)
    huge_bytes = _huge_bytes(str(path.resolve()))
    mapping.madvise(mmap.MADV_DONTNEED, start, length)
    return huge_bytes >= _ENOUGH * length


def _huge_bytes(name: str) -> int:
    """Bytes of the file called `name` that this process has mapped in huge pages."""
    total, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        word, _, rest = line.partition(" ")
        if not word.endswith(":"):
            ours = rest.endswith(name)
        elif ours and word == "FilePmdMapped:":
            total += int(rest.split()[0]) * 1024
    return total
