"""The host tier's accounts: which of its slots hold a copy of which content. No bytes here: the worker moves them.

Invariant: a slot is free, holds one content, is being written, or waits for its last reader; it is handed out again
only when it is free.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

BlockKey = tuple[int, bytes]  # KV group, block hash


@dataclass(frozen=True, slots=True)
class HostMove:
    """Copy these blocks of the pool into these slots. The blocks do not change and are not reused until it is over."""

    move_id: int
    pairs: tuple[tuple[int, int], ...]  # block id, slot


@dataclass(frozen=True, slots=True)
class HostRead:
    """Copy into a block what entry `index` of KV group `group` of a request's block table needs: from a slot, or, when
    that is None, from the pool's block `source_id`, which the request could not share without the host tier's part.
    """

    group: int
    index: int
    block_id: int
    slot: int | None
    source_id: int = 0


class HostTier:
    """Slots `0 … num_slots - 1`."""

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
        """Slots that are not free, whatever for."""
        return self.num_slots - len(self._free)

    @property
    def num_leaving(self) -> int:
        """Slots whose content is forgotten while somebody still reads it."""
        return len(self._leaving)

    def take(self) -> int:
        """A free slot; the caller checks `num_free` first."""
        return self._free.pop()

    def give_back(self, slot: int) -> None:
        """Its content is not needed any more. It becomes free when nobody reads it."""
        if self._readers[slot]:
            self._leaving.add(slot)
        else:
            self._free.append(slot)

    def begin_read(self, slot: int) -> None:
        """Do not hand it out until `end_reads`."""
        self._readers[slot] += 1

    def end_reads(self, slots: Iterable[int]) -> None:
        """One reader less of each."""
        for slot in slots:
            self._readers[slot] -= 1
            if self._readers[slot] == 0:
                del self._readers[slot]
                if slot in self._leaving:
                    self._leaving.remove(slot)
                    self._free.append(slot)

    def check(self, taken: Iterator[int]) -> None:
        """Prove the class invariant, given the slots that hold or are about to hold something.

        Raises:
            AssertionError: naming what is wrong.
        """
        used = list(taken)
        everywhere = sorted([*used, *self._free, *self._leaving])
        assert everywhere == list(range(self.num_slots)), f"slots are lost or in two places: {everywhere[:20]}"
        assert all(count > 0 for count in self._readers.values()), "a slot has fewer than no readers"
