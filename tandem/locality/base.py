"""The seam between workers, which report the blocks they gain and lose, and routers, which ask who holds a prefix.

Everything here is a hint: a wrong answer costs a recompute or a refused fetch, never a wrong token. So hashes are
shortened, loss is repaired by a snapshot rather than prevented, and what does not fit is forgotten.
Only KV group 0 is counted. It is the full-attention group where a model has one, and so the only group whose blocks
say how long a prefix is; windowed groups drop old blocks by design. A model of windowed groups alone is understated.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from tandem.core.errors import ConfigurationError, InvalidRequestError, shown
from tandem.core.events import BlockEvent, BlockStored
from tandem.core.hashing import HASH_BYTES

KEY_BYTES = 15  # NOTE: of a hash's 32. 120 bits do not collide by accident, and in CPython 16 would take a third more.
COUNTED_GROUP = 0
DEFAULT_MAX_BLOCK_REPLICAS = 8_000_000
MIN_BLOCK_REPLICAS = 1024
SILENT_S = 30.0


class PublishResult(Enum):
    """What became of a report.

    APPLIED: the index has it (a repeated sequence number is not applied twice).
    RESYNC: the index missed something, or has lost or never known this worker: send a snapshot with `replace`.
    STALE: a later incarnation of this worker has reported within `SILENT_S`; nothing was changed. Ask again later.
    """

    APPLIED = "applied"
    RESYNC = "resync"
    STALE = "stale"


@dataclass(frozen=True, slots=True)
class LocalityStats:
    """How full an index is. Replicas of workers that are gone count until they are cleaned up.

    `num_rotations` is how often the older half was forgotten since the index was created.
    """

    num_workers: int
    num_blocks: int
    num_block_replicas: int
    max_block_replicas: int
    num_rotations: int


class LocalityIndex(Protocol):
    """Who holds which blocks. Any thread may call; for each worker, reports come from one caller in order.

    A worker is known by its id and an epoch that grows with each incarnation (0 <= epoch < 2**64), unless its clock was
    set back: a later epoch that has been silent for `SILENT_S` counts no more, and an earlier one is taken. Reports are
    numbered; a snapshot says which number it reflects and the next report continues from there. A worker that has
    nothing to say still reports an empty batch now and then: only so does it learn of a loss.

    Memory is bounded by `max_block_replicas`. Entries live in two generations; what is stored or asked for moves to
    the young one. When that reaches half of the bound, the old generation is forgotten and the young one becomes old.
    So what nobody touched for longest goes first, whole chains at a time, and nothing a worker holds is forgotten as
    long as all workers together hold at most half of the bound.

    An index outside this process raises `LocalityUnavailableError` from every method when it cannot be reached.
    """

    def publish(self, worker_id: str, epoch: int, events: Sequence[BlockEvent], sequence: int) -> PublishResult:
        """Apply a worker's changes in order. `sequence` must be one more than the last that was applied.

        Raises:
            InvalidRequestError: for a hash, id or number that is out of range.
        """
        ...

    def replace(self, worker_id: str, epoch: int, hashes: Iterable[bytes], sequence: int) -> PublishResult:
        """Take `hashes` for all that this worker holds after its report `sequence`.

        What was known of the worker before is gone when this starts; `hashes` become visible at once when it ends.

        Raises:
            InvalidRequestError: for a hash, id or number that is out of range.
        """
        ...

    def leading_blocks(self, hashes: Sequence[bytes]) -> Mapping[str, int]:
        """For each worker that holds the first block of this chain, how many leading blocks it holds.

        Workers evict a chain from its end, so one that holds a block holds those before it; past a chain's first
        blocks an index may rely on that, and overstate a worker that has a gap.

        Raises:
            InvalidRequestError: for a hash that is not one.
        """
        ...

    def remove_worker(self, worker_id: str) -> None:
        """Forget a worker in O(1): its entries are invisible from now on and cleaned up later."""
        ...

    def stats(self) -> LocalityStats: ...


def net_changes(events: Iterable[BlockEvent]) -> dict[bytes, bool]:
    """Per shortened hash, whether the worker holds the block after all `events`; other groups are left out."""
    counted = [event for event in events if event.group == COUNTED_GROUP]
    check_hashes([event.block_hash for event in counted])
    return {event.block_hash[:KEY_BYTES]: isinstance(event, BlockStored) for event in counted}


def check_hashes(hashes: Sequence[bytes]) -> None:
    """Refuse what cannot be block hashes."""
    if set(map(len, hashes)) - {HASH_BYTES}:
        wrong = next(block_hash for block_hash in hashes if len(block_hash) != HASH_BYTES)
        raise InvalidRequestError(f"block hash {shown(wrong)} has {len(wrong)} bytes; send {HASH_BYTES}")


def check_report(worker_id: str, epoch: int, sequence: int) -> None:
    """Refuse a report whose header could not be kept exactly."""
    if not worker_id:
        raise InvalidRequestError("worker_id is empty; name the worker that reports")
    if not 0 <= epoch < 1 << 64:
        raise InvalidRequestError(f"epoch={epoch} of worker {worker_id!r} is out of range; use 0 to 2**64 - 1")
    if not 0 <= sequence < 1 << 53:
        raise InvalidRequestError(f"sequence={sequence} of worker {worker_id!r} is out of range; use 0 to 2**53 - 1")


def check_limit(max_block_replicas: int) -> None:
    """Refuse a bound within which not even one popular block fits."""
    if max_block_replicas < MIN_BLOCK_REPLICAS:
        raise ConfigurationError(
            f"max_block_replicas={max_block_replicas} is too small; use {MIN_BLOCK_REPLICAS} or more, best twice what "
            "all workers together can hold"
        )
