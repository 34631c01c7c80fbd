"""Events of the block pool: block hashes that a worker gained or lost.

The locality index is built from these alone, so every change of the prefix cache emits exactly one of them.
"""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockStored:
    """A block with this content can now be reused. `parent_hash` is None for a request's first block. `group`: index of
    the KV group, the layers whose state the block holds.
    """

    block_hash: bytes
    parent_hash: bytes | None
    group: int


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """No block with this content is held any more."""

    block_hash: bytes
    group: int


BlockEvent = BlockStored | BlockRemoved
BlockEventSink = Callable[[BlockEvent], None]
