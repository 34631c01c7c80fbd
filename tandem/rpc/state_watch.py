"""Calls back once when the state of a gRPC channel has changed; `session_opener` ends a session with its connection so.

NOTE: after a cancelled `wait_for_state_change`, gRPC still writes into the waiter's memory. So this wait cannot be
cancelled: it is no task, and it is referenced until it ends, at the latest when the channel is closed.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import grpc

_running: set[Coroutine[Any, Any, None]] = set()


def tell_of_change(channel: grpc.aio.Channel, state: grpc.ChannelConnectivity, tell: Callable[[], None]) -> None:
    """Calls `tell` once in the running loop when `channel` has left `state`, even for a moment."""
    watching = channel.wait_for_state_change(state)
    waiter: asyncio.Future[bool] = watching.send(None)
    _running.add(watching)

    def finish(_: "asyncio.Future[bool]") -> None:
        _running.discard(watching)
        watching.close()
        tell()

    waiter.add_done_callback(finish)
