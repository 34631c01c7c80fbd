"""Shared memory for the KV pages of a worker's ranks on one host, mapped by the leader or the host's process and by
each rank, so that one transfer can fill or read the pages of all.

Pages are in parts, one for each rank's state. If no state has heads to divide (latents), the ranks of a stage share a
part: each writes all its bytes, the same ones, before the exchange (`Collectives`) that ends the layer. So what a rank
reads of a step's own tokens, it has written itself. The memory has no name: only processes that inherit its descriptor
can map it.
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
    """Sets the size, once, when the leader knows the number of pages. Memory is allocated when it is first written."""
    os.ftruncate(descriptor, num_bytes)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)


def map_pages(descriptor: int, num_parts: int, num_pages: int, page_bytes: int) -> torch.Tensor:
    """Maps the pages as [num_parts, num_pages, page_bytes] uint8, the same bytes in every process. The descriptor may
    be closed afterwards.

    Args:
        num_parts: parts of all stages: for each stage the ranks that divide it, or 1 if they share a part.
        num_pages: pages of each part, including the null block.
    """
    num_bytes = num_parts * num_pages * page_bytes
    assert os.fstat(descriptor).st_size == num_bytes, "the leader has another layout"
    mapped = torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)
    return mapped.view(num_parts, num_pages, page_bytes)
