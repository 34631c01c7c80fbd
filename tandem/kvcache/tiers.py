"""Host tier of the KV cache: accounting of slots in host memory, which hold copies of pages. The worker copies the
bytes.

Invariant: a slot is free, holds one content, is being written, or waits for its last reader; only a free slot is
allocated.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

BlockKey = tuple[int, bytes]  # a content: KV group, block hash


@dataclass(frozen=True, slots=True)
class HostMove:
    """Copy of blocks of the pool into slots. The blocks are neither changed nor reused until it has ended."""

    move_id: int
    pairs: tuple[tuple[int, int], ...]  # page, slot


@dataclass(frozen=True, slots=True)
class HostRead:
    """A copy into the block of entry `index` of KV group `group` in a request's block table: page by page, into
    `pages`. The source are `slots` or, if there are none, the pool's block `source_id` of `source_pages`.

    The request cannot share that block directly, since its prefix is only complete with the host tier's blocks.
    """

    group: int
    index: int
    pages: tuple[int, ...]
    slots: tuple[int, ...]
    source_id: int = 0
    source_pages: tuple[int, ...] = ()


class HostTier:
    """Allocation of the slots `0 … num_slots - 1`."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(reversed(range(num_slots)))
        self._readers: Counter[int] = Counter()
        self._leaving: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_taken(self) -> int:
        """Number of slots that are not free, for any reason."""
        return self.num_slots - len(self._free)

    @property
    def num_leaving(self) -> int:
        """Number of released slots that are still being read."""
        return len(self._leaving)

    def take(self, count: int) -> tuple[int, ...]:
        """Allocate free slots; the caller checks `num_free` first."""
        return tuple(self._free.pop() for _ in range(count))

    def give_back(self, slots: Iterable[int]) -> None:
        """Release slots; each becomes free after its last read has ended."""
        for slot in slots:
            if self._readers[slot]:
                self._leaving.add(slot)
            else:
                self._free.append(slot)

    def begin_read(self, slots: Iterable[int]) -> None:
        """Protect slots from reuse until `end_reads`."""
        self._readers.update(slots)

    def end_reads(self, slots: Iterable[int]) -> None:
        """End one read of each slot."""
        for slot in slots:
            self._readers[slot] -= 1
            if self._readers[slot] == 0:
                del self._readers[slot]
                if slot in self._leaving:
                    self._leaving.remove(slot)
                    self._free.append(slot)

    def check(self, taken: Iterator[int]) -> None:
        """Check the module's invariant, given the slots that hold a content or are being written.

        Raises:
            AssertionError: naming what is wrong.
        """
        used = list(taken)
        everywhere = sorted([*used, *self._free, *self._leaving])
        assert everywhere == list(range(self.num_slots)), f"slots are lost or in two places: {everywhere[:20]}"
        assert all(count > 0 for count in self._readers.values()), "a slot has fewer than no readers"
