"""Sends what ranks of this host publish to other hosts: a thread for each rank, for as long as the epoch lives."""

import threading
from collections.abc import Callable
from contextlib import suppress

from tandem.compute.native.exchange_mirror import ExchangeMirror


def forward(mirror: ExchangeMirror, rank: int, send: Callable[[int, int, memoryview], None]) -> threading.Thread:
    """Calls `send` with rank, number and bytes of each exchange, in their order. It ends with the group, or when `send`
    raises OSError.
    """

    def work() -> None:
        with suppress(OSError):
            while (found := mirror.await_next(rank)) is not None:
                send(rank, *found)

    thread = threading.Thread(target=work, name=f"tandem-forward-{rank}", daemon=True)
    thread.start()
    return thread
