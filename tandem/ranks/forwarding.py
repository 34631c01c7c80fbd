"""Forwards what the ranks of this host publish to the other hosts of the group, for as long as the epoch lives.

Ranks of one host exchange data through its shared memory, where `LinksMirror` finds what other hosts have to get. A
*lane* is what one rank publishes in one exchange or pipe, in order; each lane has a thread.
"""

import threading
from collections.abc import Callable
from contextlib import suppress

from tandem.compute.native.links_mirror import LinksMirror


def forward(mirror: LinksMirror, lane: int, send: Callable[[int, int, memoryview], None]) -> threading.Thread:
    """Starts a thread that calls `send` with lane, number and bytes of each exchange, in order. It ends with the group,
    or when `send` raises OSError.
    """

    def work() -> None:
        with suppress(OSError):
            while (found := mirror.await_next(lane)) is not None:
                send(lane, *found)

    thread = threading.Thread(target=work, name=f"tandem-forward-{lane}", daemon=True)
    thread.start()
    return thread
