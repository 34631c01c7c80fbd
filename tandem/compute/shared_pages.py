"""Memory for the KV pages of all ranks of a worker, which each of them maps: one hand-off can fill or read them all.

State without heads is there once. Every rank writes the same bytes of it, a layer's before the exchange that ends the
layer, and reads nothing of a step but what it has written itself.
Nothing but a descriptor leads to it, so only processes that inherit that have it. Its size is set once, when the leader
knows how many blocks there are.
"""

import fcntl
import mmap
import os

import torch

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def make_memory() -> int:
    """A descriptor of memory without a size or a name; the caller closes it."""
    return os.memfd_create("tandem-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def set_size(descriptor: int, num_bytes: int) -> None:
    """For good. Pages are taken when they are first written."""
    os.ftruncate(descriptor, num_bytes)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)


def map_pages(descriptor: int, num_parts: int, num_blocks: int, page_bytes: int) -> torch.Tensor:
    """[num_parts, num_blocks, page_bytes] uint8, the same bytes in every process. The descriptor may be closed then.

    `num_parts`: as many as ranks, or one that they share. `num_blocks`: of each, the null block included.
    """
    num_bytes = num_parts * num_blocks * page_bytes
    assert os.fstat(descriptor).st_size == num_bytes, "the leader has another layout"
    mapped = torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)
    return mapped.view(num_parts, num_blocks, page_bytes)
