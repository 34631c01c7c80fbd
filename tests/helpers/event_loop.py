"""One event loop for the calls of tests that are not coroutines: gRPC goes on writing to a loop that was closed."""

import asyncio
import functools
import threading
from collections.abc import Coroutine
from typing import TypeVar

T = TypeVar("T")


def run(work: Coroutine[object, object, T]) -> T:
    """As `asyncio.run`, on the shared loop; any thread may call it, several at once."""
    return asyncio.run_coroutine_threadsafe(work, _loop()).result()


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="event loop of tests", daemon=True).start()
    return loop
