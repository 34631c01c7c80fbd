"""Prefix cache of one simulated worker: least recently used blocks go first. Block ids are the trace's."""

from collections import OrderedDict
from collections.abc import Sequence


class SimulatedPrefixCache:
    """LRU cache of at most `num_blocks` blocks."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._held: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def leading(self, block_ids: Sequence[int]) -> int:
        """Number of leading blocks of the prompt that are held."""
        held = self._held
        for number, block_id in enumerate(block_ids):
            if block_id not in held:
                return number
        return len(block_ids)

    def keep(self, block_ids: Sequence[int]) -> None:
        """Add the blocks of a computed prompt. Its last blocks are evicted first: they are of least use to others."""
        held = self._held
        for block_id in reversed(block_ids):
            held[block_id] = None
            held.move_to_end(block_id)
        while len(held) > self._num_blocks:
            held.popitem(last=False)
