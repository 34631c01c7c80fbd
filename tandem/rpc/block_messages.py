"""Messages by which a worker reports its cached blocks to the locality index that a router has in its own process."""

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.core.events import BlockEvent


@dataclass(frozen=True, slots=True)
class BlockReport:
    """Blocks that a worker stored and removed: the arguments of `RouterHandler.publish`.

    Args:
        epoch: number of the run of the worker's process; larger after each restart.
        sequence: number of this report; it is applied if it is one more than that of the last one applied.
    """

    worker_id: str
    epoch: int
    events: Sequence[BlockEvent]
    sequence: int


@dataclass(frozen=True, slots=True)
class BlockSnapshot:
    """All blocks that a worker has: the arguments of `RouterHandler.replace`.

    Args:
        epoch: number of the run of the worker's process; larger after each restart.
        sequence: number of the report after which these blocks are stored.
    """

    worker_id: str
    epoch: int
    block_hashes: Sequence[bytes]
    sequence: int
