"""Reads large bodies in a thread, one at a time, so that they never hold up the streams of others.

Parsing holds the interpreter's lock. What bounds each turn is the number of values that a body may have; one at a time
bounds how often the event loop has to wait for one.
"""

import asyncio
from collections.abc import Callable
from typing import TypeVar

LARGE_BYTES = 64 * 1024  # of a body; smaller ones are read in a millisecond

T = TypeVar("T")


class OffLoop:
    """Of one event loop."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def run(self, num_bytes: int, work: Callable[[], T]) -> T:
        """What `work` returns or raises; it reads a body of `num_bytes`."""
        if num_bytes <= LARGE_BYTES:
            return work()
        async with self._turn:
            return await asyncio.to_thread(work)
