"""Hardware floors: the best possible rates, measured in the same minute and with the same threads as the systems."""

import functools
import statistics
import time
from collections.abc import Callable

import torch

from tandem.compute.huge_pages import advise_huge_pages

READ_BYTES = 1 << 30
MATMUL_SIZE = 2048
_CHOICE_SIZE = 512  # enough to tell dtypes apart: a processor without bfloat16 takes a minute for one large product


def read_bandwidth(repeats: int = 5) -> float:
    """Bytes per second of a threaded sum over 1 GiB in huge pages, where there are any; the median of `repeats`."""
    data = torch.empty(READ_BYTES // 8, dtype=torch.int64)
    advise_huge_pages(data)
    data.fill_(1)
    data.sum()
    return READ_BYTES / statistics.median(_seconds(data.sum) for _ in range(repeats))


def matmul_rate(dtype: torch.dtype, repeats: int = 7, size: int = MATMUL_SIZE) -> float:
    """FLOP per second of PyTorch's square matrix product; the median of `repeats`."""
    left = torch.randn(size, size).to(dtype)
    right = torch.randn(size, size).to(dtype)
    left @ right
    return 2 * size**3 / statistics.median(_seconds(lambda: left @ right) for _ in range(repeats))


@functools.cache
def fastest_dtype() -> torch.dtype:
    """Of bfloat16 and float32 the one whose products run faster: not every processor multiplies bfloat16."""
    return max((torch.bfloat16, torch.float32), key=lambda dtype: matmul_rate(dtype, size=_CHOICE_SIZE))


def _seconds(call: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    call()
    return time.perf_counter() - started_s
