"""Asks the kernel to hold weights in huge pages: a decode step reads them all, and reads large ones faster so.

Files stay in the page cache, shared by all processes. Everything here is a wish: where the kernel or the file system
has no huge pages for it, nothing changes but a little time. It must never change what a file or a tensor holds.
"""

import ctypes
import mmap
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

PIECE_BYTES = 64 << 20
LEAST_BYTES = 8 << 20
LEAST_BYTES_PER_S = 200e6
_ENOUGH = 0.75  # of a piece; its ends may share a huge page with something else
_MADV_POPULATE_READ = 22  # NOTE: Python's mmap does not name it yet


def cache_in_huge_pages(path: Path, clock: Callable[[], float] = time.monotonic) -> int:
    """Brings the file into the page cache in huge pages; returns the bytes of the pieces that are now so.

    A piece that is cached in small pages is dropped and read again; the kernel drops only what is not mapped. The
    first piece that comes back in small pages, or slower than `LEAST_BYTES_PER_S`, is the last: more would not be worth
    it. A file that cannot be read is left to the process that opens it next.
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
    """Wishes for huge pages under the tensor's whole storage, for what is yet to be read or written there."""
    storage = tensor.untyped_storage()
    if storage.nbytes() < LEAST_BYTES or tensor.device.type != "cpu" or not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    first = -(-storage.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (storage.data_ptr() + storage.nbytes() - first) // mmap.PAGESIZE * mmap.PAGESIZE
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), ctypes.c_int(mmap.MADV_HUGEPAGE))


def _is_read_hugely(mapping: mmap.mmap, start: int, length: int, path: Path) -> bool:
    """Reads a piece and lets go of it; whether most of it was in huge pages."""
    mapping.madvise(_MADV_POPULATE_READ, start, length)
    huge_bytes = _huge_bytes(str(path.resolve()))
    mapping.madvise(mmap.MADV_DONTNEED, start, length)
    return huge_bytes >= _ENOUGH * length


def _huge_bytes(name: str) -> int:
    """Bytes of the file of that name that this process has mapped in huge pages."""
    total, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        word, _, rest = line.partition(" ")
        if not word.endswith(":"):
            ours = rest.endswith(name)
        elif ours and word == "FilePmdMapped:":
            total += int(rest.split()[0]) * 1024
    return total
