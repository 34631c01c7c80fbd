"""State of peers and of reads in flight that the owner thread (`owner`) keeps; other threads use only what is noted."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from tandem.transport.nixl.agent import NixlAgent, RemoteAgent
from tandem.transport.peers import LinkPace
from tandem.transport.transfer import Transfer


@dataclass(slots=True, eq=False)
class PeerLink:
    """Link to a peer. `broken`: reason why it can no longer be read from, None = it can; any thread may read this
    field.
    """

    remote: RemoteAgent
    pace: LinkPace = field(default_factory=LinkPace)
    broken: str | None = None
    inflight_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Part:
    """Part of a read that is posted in one call: `start` posts it and returns NIXL's handle."""

    num_bytes: int
    start: Callable[[NixlAgent, RemoteAgent], int]


@dataclass(slots=True, eq=False)
class Flight:
    """A read in flight: parts yet to be posted, and posted ones. `deadline_s` is a time of the transport's clock."""

    link: PeerLink
    transfer: Transfer
    deadline_s: float
    waiting: deque[Part]
    posted: dict[int, Part] = field(default_factory=dict)
    first_posted_s: float | None = None
