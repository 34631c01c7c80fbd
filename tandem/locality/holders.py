"""Holders of each block, in two generations and bounded memory: the table inside the embedded index.

Invariant: a key is in at most one generation, and neither generation counts more than half of the bound.
Holders are packed 32-bit slot numbers in a `bytes`, shared between blocks that have the same holders: a million blocks
cost a dictionary entry and a key each, and the garbage collector has nothing to traverse.
"""

from array import array
from collections.abc import Iterable

SLOT_BYTES = 4  # of a packed slot number, which stands for one incarnation of a worker
NOBODY = b""  # holders of a block that no worker holds
_MAX_SHARED_BYTES = 1 << 22  # NOTE: of holders; what thousands hold was held by every smaller number of them before
_OBJECT_BYTES = 100  # of a shared `bytes` beside its content


def pack(slots: Iterable[int]) -> bytes:
    """Packs slot numbers into holders, in ascending order."""
    return array("I", sorted(slots)).tobytes()


def unpack(holders: bytes) -> "array[int]":
    """Returns the slot numbers in `holders`."""
    return array("I", holders)


class HolderTable:
    """Map from block keys to holders. Writing a key moves it to the recent generation."""

    def __init__(self, max_block_replicas: int) -> None:
        self.num_rotations = 0
        self._half = max_block_replicas // 2
        self._young: dict[bytes, bytes] = {}
        self._old: dict[bytes, bytes] = {}
        self._num_young = 0
        self._num_old = 0
        self._shared: dict[bytes, bytes] = {}
        self._shared_bytes = 0

    @property
    def num_blocks(self) -> int:
        return len(self._young) + len(self._old)

    @property
    def num_block_replicas(self) -> int:
        return self._num_young + self._num_old

    def get(self, key: bytes) -> bytes:
        """Returns the holders of a key, `NOBODY` if there are none. Equal holders are mostly the same object."""
        return self._young.get(key) or self._old.get(key, NOBODY)

    @property
    def has_old(self) -> bool:
        """Whether the previous generation has any keys."""
        return bool(self._old)

    def is_old(self, key: bytes) -> bool:
        """Whether a key is in the previous generation."""
        return key in self._old

    def put(self, key: bytes, holders: bytes) -> None:
        """Set the holders of a key and move it to the recent generation; `NOBODY` removes it. May first drop the whole
        previous generation.
        """
        self._discard(key)
        if not holders:
            return
        count = len(holders) // SLOT_BYTES
        if self._num_young + count > self._half:
            self._rotate()
        self._young[key] = self._share(holders)
        self._num_young += count

    def _discard(self, key: bytes) -> None:
        if (holders := self._young.pop(key, None)) is not None:
            self._num_young -= len(holders) // SLOT_BYTES
        elif (holders := self._old.pop(key, None)) is not None:
            self._num_old -= len(holders) // SLOT_BYTES

    def _rotate(self) -> None:
        self._old, self._young = self._young, {}
        self._num_old, self._num_young = self._num_young, 0
        self.num_rotations += 1

    def _share(self, holders: bytes) -> bytes:
        """Returns the same object for equal holders, as long as it is cached."""
        known = self._shared.get(holders)
        if known is not None:
            return known
        if self._shared_bytes >= _MAX_SHARED_BYTES:
            self._shared.clear()
            self._shared_bytes = 0
        self._shared[holders] = holders
        self._shared_bytes += len(holders) + _OBJECT_BYTES
        return holders
