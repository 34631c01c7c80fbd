"""Eviction queue: ids of blocks in the order in which they are to be evicted.

An array of entries, and an index (*place*) for each block. A block leaves the queue by clearing its place; its entry
stays behind and no longer counts. Such entries are dropped when they reach the front or the buffer is full, so memory
is bounded.
"""

from array import array
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

BlockIds = npt.NDArray[np.int32]  # a *column*: many block ids, [n], none twice

_LEAST_ENTRIES = 64  # of the buffer beyond two a block
_TRIED = 16  # entries that are looked at one by one before many are at once
_CHUNK = 1024  # entries that are looked at together


class EvictionQueue:
    """Queue of blocks out of 1 … `num_blocks`, none of them twice."""

    def __init__(self, num_blocks: int) -> None:
        self._entries = array("i", bytes(4 * (2 * num_blocks + _LEAST_ENTRIES)))
        self._places = array("i", bytes(4 * (num_blocks + 1)))  # of each block's entry; 0 = it is not in the queue
        # NOTE: single values are read from arrays, three times as fast as from the same memory as columns
        self._entry_column = np.frombuffer(self._entries, dtype=np.int32)
        self._place_column = np.frombuffer(self._places, dtype=np.int32)
        self._first = self._end = 1
        self._num_blocks = 0
        self.place_of = self._places.__getitem__

    def __len__(self) -> int:
        return self._num_blocks

    def __contains__(self, block_id: int) -> bool:
        return self._places[block_id] != 0

    def __iter__(self) -> Iterator[int]:
        return iter(self._in_order().tolist())

    def are_in(self, block_ids: BlockIds) -> npt.NDArray[np.bool_]:
        """Whether each of these blocks is in the queue."""
        return np.not_equal(self._place_column[block_ids], 0)

    def extend(self, block_ids: Sequence[int]) -> None:
        """Append blocks, in this order. None of them may be in the queue."""
        if self._end + len(block_ids) > len(self._entries):
            self._compact()
        entries, places = self._entries, self._places
        for place, block_id in enumerate(block_ids, self._end):
            entries[place] = block_id
            places[block_id] = place
        self._end += len(block_ids)
        self._num_blocks += len(block_ids)

    def extend_column(self, block_ids: BlockIds) -> None:
        """`extend` for many blocks, faster."""
        if self._end + len(block_ids) > len(self._entries):
            self._compact()
        end = self._end + len(block_ids)
        self._entry_column[self._end : end] = block_ids
        self._place_column[block_ids] = np.arange(self._end, end, dtype=np.int32)
        self._end = end
        self._num_blocks += len(block_ids)

    def prepend(self, block_id: int) -> None:
        """Add a block at the front, so that it is evicted next."""
        if self._first == 1:
            self._compact()
        self._first -= 1
        self._entries[self._first] = block_id
        self._places[block_id] = self._first
        self._num_blocks += 1

    def remove(self, block_ids: Sequence[int]) -> None:
        """Take out blocks, wherever they are."""
        places = self._places
        for block_id in block_ids:
            assert places[block_id], f"block {block_id} is not in the queue"
            places[block_id] = 0
        self._num_blocks -= len(block_ids)

    def remove_column(self, block_ids: BlockIds) -> None:
        """`remove` for many blocks, faster; all must be in the queue."""
        self._place_column[block_ids] = 0
        self._num_blocks -= len(block_ids)

    @property
    def first(self) -> int:
        """The block that is evicted next; the queue must not be empty. Drops stale entries before it."""
        assert self._num_blocks, "nothing can be evicted"
        self._first = self._first_that_counts()
        return self._entries[self._first]

    def pop(self) -> int:
        """Remove and return the block that is evicted next; the queue must not be empty."""
        block_id = self.first
        self.remove((block_id,))
        return block_id

    def check(self) -> None:
        """Check that every block with a place has its entry there, and is counted.

        Raises:
            AssertionError: naming what is wrong.
        """
        placed = np.flatnonzero(self._place_column)
        places = self._place_column[placed]
        assert len(placed) == self._num_blocks, f"{self._num_blocks} blocks are counted; {len(placed)} have a place"
        assert ((self._first <= places) & (places < self._end)).all(), "a block's place is outside the queue"
        assert (self._entry_column[places] == placed).all(), "another block has an entry at a block's place"
        assert 1 <= self._first <= self._end <= len(self._entries), "the queue is outside its buffer"

    def _first_that_counts(self) -> int:
        entries, places, end = self._entries, self._places, min(self._first + _TRIED, self._end)
        for index in range(self._first, end):
            if places[entries[index]] == index:
                return index
        for start in range(end, self._end, _CHUNK):
            found = np.flatnonzero(self._counting(start, min(start + _CHUNK, self._end)))
            if len(found):
                return start + int(found[0])
        raise AssertionError("a block of the queue has no entry")

    def _counting(self, start: int, end: int) -> npt.NDArray[np.bool_]:
        places = self._place_column[self._entry_column[start:end]]
        return np.equal(places, np.arange(start, end, dtype=np.int32))

    def _in_order(self) -> BlockIds:
        return self._entry_column[self._first : self._end][self._counting(self._first, self._end)]

    def _compact(self) -> None:
        """Keep only entries that count. NOTE: more than half of the buffer is free then, so this is rare."""
        block_ids = self._in_order()
        num_spare = len(self._entries) - 1 - len(block_ids)
        self._first = 1 + num_spare // 4
        self._end = self._first + len(block_ids)
        self._entry_column[self._first : self._end] = block_ids
        self._place_column[block_ids] = np.arange(self._first, self._end, dtype=np.int32)
