"""Watches a channel's state: tells once when it has left the one it had.

NOTE: gRPC writes into the memory of whoever waits in `wait_for_state_change` after the wait was cancelled. So nobody
can cancel this one: it is no task, and it is kept until it is over, which closing the channel brings about.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import grpc

_running: set[Coroutine[Any, Any, None]] = set()


def tell_of_change(channel: grpc.aio.Channel, state: grpc.ChannelConnectivity, tell: Callable[[], None]) -> None:
    """Call `tell` in the running loop once `channel` is not, or has meanwhile not been, in `state`."""
    watching = channel.wait_for_state_change(state)
    waiter: asyncio.Future[bool] = watching.send(None)
    _running.add(watching)

    def finish(_: "asyncio.Future[bool]") -> None:
        _running.discard(watching)
        watching.close()
        tell()

    waiter.add_done_callback(finish)
