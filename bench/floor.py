"""What the hardware could do at best, measured in the same minute and with the same threads as the systems."""

import functools
import statistics
import time
from collections.abc import Callable

import torch

from tandem.kernels.huge_pages import advise_huge_pages

READ_BYTES = 1 << 30
MATMUL_SIZE = 2048


def read_bandwidth(repeats: int = 5) -> float:
    """Bytes per second of a threaded sum over 1 GiB in huge pages, where there are any; the median of `repeats`."""
    data = torch.empty(READ_BYTES // 8, dtype=torch.int64)
    advise_huge_pages(data)
    data.fill_(1)
    data.sum()
    return READ_BYTES / statistics.median(_seconds(data.sum) for _ in range(repeats))


def matmul_rate(dtype: torch.dtype, repeats: int = 7) -> float:
    """FLOP per second of PyTorch's square matrix product; the median of `repeats`."""
    left = torch.randn(MATMUL_SIZE, MATMUL_SIZE).to(dtype)
    right = torch.randn(MATMUL_SIZE, MATMUL_SIZE).to(dtype)
    left @ right
    return 2 * MATMUL_SIZE**3 / statistics.median(_seconds(lambda: left @ right) for _ in range(repeats))


@functools.cache
def fastest_dtype() -> torch.dtype:
    """Of bfloat16 and float32 the one whose products run faster: not every processor multiplies bfloat16."""
    return max((torch.bfloat16, torch.float32), key=matmul_rate)


def _seconds(call: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    call()
    return time.perf_counter() - started_s
