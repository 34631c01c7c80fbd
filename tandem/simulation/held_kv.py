"""KV of the simulated model in the pages of one rank: the keys of its heads, then the values of its heads."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from tandem.simulation.model import KV_SPEC

HeldStates = NDArray[np.uint8]  # [positions, keys or values, heads, bytes]
_KINDS, _HEAD_BYTES = 2, 2


class HeldKV:
    """Reads and writes one rank's heads in its pages.

    Args:
        pages: [num_blocks, page_bytes] uint8.
        rank, num_ranks: the ranks divide the heads evenly.
    """

    def __init__(self, pages: torch.Tensor, block_size: int, rank: int = 0, num_ranks: int = 1) -> None:
        self._block_size = block_size
        self._num_heads = KV_SPEC.num_kv_heads // num_ranks
        self._heads = slice(rank * self._num_heads, (rank + 1) * self._num_heads)
        self._pages = pages.numpy().reshape(len(pages), _KINDS, self._num_heads, block_size, _HEAD_BYTES)

    def read(self, blocks: Sequence[int], num_tokens: int) -> HeldStates:
        """A copy of the KV of the first `num_tokens` positions in these blocks."""
        num_blocks = -(-num_tokens // self._block_size)
        found = self._pages[list(blocks[:num_blocks])].transpose(0, 3, 1, 2, 4)
        return found.reshape(-1, _KINDS, self._num_heads, _HEAD_BYTES)[:num_tokens]

    def write(self, block: int, slot: int, state: bytes) -> None:
        """Writes this rank's heads of a position's KV, `state`."""
        whole = np.frombuffer(state, np.uint8).reshape(_KINDS, -1, _HEAD_BYTES)
        self._pages[block, :, :, slot] = whole[:, self._heads]


def joined(parts: Sequence[HeldStates]) -> bytes:
    """The KV of positions with all heads, given every rank's heads."""
    return np.concatenate(parts, axis=2).tobytes()
