"""Shared memory for the KV pages of all ranks of a worker, mapped by each of them, so that one transfer can fill or
read them all.

State without heads is stored once. Every rank writes the same bytes of it, before the exchange that ends the layer, and
reads only state of a step that it has written itself. The memory has no name: only processes that inherit its
descriptor can map it. The size is set once, when the leader knows the number of blocks.
"""

import fcntl
import mmap
import os

import torch

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def make_memory() -> int:
    """Descriptor of new shared memory, still without a size; the caller closes it."""
    return os.memfd_create("tandem-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def set_size(descriptor: int, num_bytes: int) -> None:
    """Sets the size, which cannot be changed later. Memory is allocated when it is first written."""
    os.ftruncate(descriptor, num_bytes)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)


def map_pages(descriptor: int, num_parts: int, num_blocks: int, page_bytes: int) -> torch.Tensor:
    """Maps the pages as [num_parts, num_blocks, page_bytes] uint8, the same bytes in every process. The descriptor may
    be closed afterwards.

    `num_parts`: number of ranks, or 1 if they share one part. `num_blocks`: of each part, including the null block.
    """
    num_bytes = num_parts * num_blocks * page_bytes
    assert os.fstat(descriptor).st_size == num_bytes, "the leader has another layout"
    mapped = torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)
    return mapped.view(num_parts, num_blocks, page_bytes)
