"""Number of blocks of a pool in each state."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVCacheUsage:
    """Number of blocks in each state; `total` is the sum of the others.

    A block is pinned if a transfer may write or read it, else leased if a peer may read it, else used if a request owns
    it, else kept if its content is promised to stay cached.
    """

    total: int
    free: int
    cached: int
    used: int
    leased: int = 0
    pinned: int = 0
    kept: int = 0
