"""Pools of known bytes, and what a pool must hold after a read."""

import threading

import numpy as np
from numpy.typing import NDArray

from tandem.transport.base import MemoryPool
from tandem.transport.transfer import Transfer

COMPATIBILITY = {"model": "tiny-1f3a", "kv_layout": "4x2x16x64", "dtype": "bfloat16", "block_size": "16", "hash": "1"}
Pages = NDArray[np.uint8]


def seeded_pages(seed: int, num_blocks: int, page_bytes: int) -> Pages:
    """[num_blocks, page_bytes] of random bytes, the same for the same arguments in any process."""
    return np.random.default_rng(seed).integers(0, 256, (num_blocks, page_bytes), dtype=np.uint8)


def pool_of(pages: Pages, num_ranks: int = 1, piece_bytes: int | None = None) -> MemoryPool:
    """The pool over these pages, whose memory it keeps alive."""
    num_blocks, page_bytes = pages.shape
    return MemoryPool(pages.ctypes.data, page_bytes, num_blocks, "cpu", pages, num_ranks, piece_bytes)


def expected_pages(before: Pages, source: Pages, remote_blocks: list[int], local_blocks: list[int]) -> Pages:
    """Pages of `before` after a read."""
    after = before.copy()
    after[local_blocks] = source[remote_blocks]
    return after


def wait_over(transfer: Transfer, timeout_s: float) -> bool:
    """Whether nothing more is written on its behalf, waiting up to `timeout_s` for that."""
    over = threading.Event()
    transfer.add_over_callback(lambda _: over.set())
    return over.wait(timeout_s)
