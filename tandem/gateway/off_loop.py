"""Parses large bodies in a thread, one at a time, so that they do not delay other requests' streams.

Parsing holds the interpreter's lock. Its duration is bounded by the number of values that a body may have, and one at a
time bounds how often the event loop has to wait for it.
"""

import asyncio
from collections.abc import Callable
from typing import TypeVar

LARGE_BYTES = 64 * 1024  # of a body; smaller ones are read in a millisecond

T = TypeVar("T")


class OffLoop:
    """Runs work on large bodies in a thread, one body of an event loop at a time."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def run(self, num_bytes: int, work: Callable[[], T]) -> T:
        """Returns the result of `work`, which reads a body of `num_bytes`; small ones run in the event loop."""
        if num_bytes <= LARGE_BYTES:
            return work()
        async with self._turn:
            return await asyncio.to_thread(work)
