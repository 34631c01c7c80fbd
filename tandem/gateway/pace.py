"""Paces the writes of a stream: tokens that arrive in quick succession are sent in one write."""

import asyncio

from tandem.core.clock import Clock

FLUSH_S = 0.004  # least time between two writes


class StreamPacer:
    """Keeps writes of one stream `FLUSH_S` apart. A stream slower than one token in `FLUSH_S` is never delayed."""

    def __init__(self, clock: Clock, flush_s: float = FLUSH_S) -> None:
        self._clock = clock
        self._flush_s = flush_s
        self._next_s = float("-inf")

    async def wait(self) -> None:
        """Waits until the next write is due; call when there is something to write."""
        now_s = self._clock.now_s()
        if now_s < self._next_s:
            await asyncio.sleep(self._next_s - now_s)
            now_s = self._clock.now_s()
        self._next_s = now_s + self._flush_s
