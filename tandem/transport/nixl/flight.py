"""State of one read, and of one peer, in the owner thread. Touched by that thread only, unless said otherwise."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from tandem.transport.nixl.agent import NixlAgent, RemoteAgent
from tandem.transport.peers import LinkPace
from tandem.transport.transfer import Transfer


@dataclass(slots=True, eq=False)
class PeerLink:
    """A peer. `broken` says why it can no longer be read from; any thread may look at it."""

    remote: RemoteAgent
    pace: LinkPace = field(default_factory=LinkPace)
    broken: str | None = None
    inflight_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a read that is posted at once: `start` posts it and returns NIXL's handle."""

    num_bytes: int
    start: Callable[[NixlAgent, RemoteAgent], int]


@dataclass(slots=True, eq=False)
class Flight:
    """A read: its parts yet to be posted, and those NIXL is working on. `deadline_s` is on the transport's clock."""

    link: PeerLink
    transfer: Transfer
    deadline_s: float
    waiting: deque[Part]
    posted: dict[int, Part] = field(default_factory=dict)
    first_posted_s: float | None = None
