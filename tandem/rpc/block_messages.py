"""Reports of a worker's blocks to the embedded locality index."""

from collections.abc import Sequence
from dataclasses import dataclass

from tandem.core.events import BlockEvent


@dataclass(frozen=True, slots=True)
class BlockReport:
    """The arguments of `RouterHandler.publish`."""

    worker_id: str
    epoch: int
    events: Sequence[BlockEvent]
    sequence: int


@dataclass(frozen=True, slots=True)
class BlockSnapshot:
    """The arguments of `RouterHandler.replace`."""

    worker_id: str
    epoch: int
    block_hashes: Sequence[bytes]
    sequence: int
