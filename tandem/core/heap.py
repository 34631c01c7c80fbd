"""Bounds the memory that the C library's heap retains in a process that serves many requests from several threads.

By default glibc gives threads up to eight arenas per core. After a large buffer was freed, it allocates later ones of
that size from an arena, where small live allocations keep freed pages from being returned to the system. Mapping each
buffer to pages of its own would cost a page fault for every 4 KiB. The settings are a compromise: buffers as large as
the token ids of a long prompt come from an arena, which retains at its end what one such request needs.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

MAX_ARENAS = 2
LARGE_BYTES = 512 * 1024  # buffers of this size and larger are pages of their own, unless the arena has room at its end
RETAINED_BYTES = 4 * 2**20  # at the end of an arena; what is free beyond is returned
_ADAPTED_BYTES = 32 * 2**20  # to which glibc raises the size of large ones by itself, as such buffers are freed
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # of malloc.h


def bound_heap() -> bool:
    """Bound the memory retained by freed buffers. Call before starting threads. False: the C library lacks this."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    settings = ((_M_ARENA_MAX, MAX_ARENAS), (_M_MMAP_THRESHOLD, LARGE_BYTES), (_M_TRIM_THRESHOLD, RETAINED_BYTES))
    taken = [mallopt(name, value) == 1 for name, value in settings]
    return all(taken)


@contextmanager
def large_buffers_given_back() -> Iterator[None]:
    """While it lasts, a large buffer is pages of its own, so that the system has them back once it is freed; for work
    that makes many large buffers of different sizes and lasting ones between them.

    Afterwards glibc takes buffers from arenas again, up to the size to which it would have adapted by itself. Not for a
    process with a bounded heap.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        yield
        return
    mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)
    try:
        yield
    finally:
        mallopt(_M_MMAP_THRESHOLD, _ADAPTED_BYTES)
        mallopt(_M_TRIM_THRESHOLD, 2 * _ADAPTED_BYTES)


def trim_heap() -> bool:
    """Return all free pages of the heap to the system. False: there were none, or the C library lacks this.

    What freed many small buffers calls it: `LARGE_BYTES` is about large ones only. Other threads' allocations wait for
    it, some 0.2 ms for each free MB.
    """
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return malloc_trim is not None and malloc_trim(0) == 1
