"""Reports this worker's cached blocks to locality indexes: one feed into Redis, or one into each router's own index."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any

from tandem.core.errors import LocalityUnavailableError, TandemError
from tandem.core.events import BlockEvent
from tandem.locality.base import LocalityIndex, LocalityStats, PublishResult
from tandem.locality.feed import BlockFeed
from tandem.rpc.client import RouterClient
from tandem.rpc.credentials import Credentials

FLUSH_INTERVAL_S = 0.2  # between two reports to an index
STALE_INTERVAL_S = 5.0  # the same while an index knows a later incarnation of this worker
CALL_TIMEOUT_S = 2.0  # of one call of a router

logger = logging.getLogger(__name__)


Call = Coroutine[Any, Any, PublishResult]
InThread = Callable[[Callable[[], PublishResult]], Awaitable[PublishResult]]
"""Runs a function that blocks in a thread, so that the event loop does not wait."""


class RouterIndex:
    """Publishing half of the `LocalityIndex` in a router, called through gRPC from threads other than the event loop's.
    Failures, and calls of the other half, raise `LocalityUnavailableError`.

    Args:
        wait: has the event loop make a call, and waits for its result for so many seconds at most.
    """

    def __init__(self, address: str, credentials: Credentials, wait: Callable[[Call, float], PublishResult]) -> None:
        self._client = RouterClient(address, credentials)
        self._wait_for = wait

    def publish(self, worker_id: str, epoch: int, events: Sequence[BlockEvent], sequence: int) -> PublishResult:
        return self._wait(self._client.publish(worker_id, epoch, events, sequence, timeout_s=CALL_TIMEOUT_S))

    def replace(self, worker_id: str, epoch: int, hashes: Iterable[bytes], sequence: int) -> PublishResult:
        return self._wait(self._client.replace(worker_id, epoch, list(hashes), sequence, timeout_s=CALL_TIMEOUT_S))

    def leading_blocks(self, hashes: Sequence[bytes]) -> Mapping[str, int]:
        raise LocalityUnavailableError("a router's index answers only that router")

    def resumable_blocks(self, hashes: Sequence[bytes], leading: Mapping[str, int]) -> Mapping[str, int]:
        raise LocalityUnavailableError("a router's index answers only that router")

    def remove_worker(self, worker_id: str) -> None:
        raise LocalityUnavailableError("a router removes workers from its index by itself")

    def stats(self) -> LocalityStats:
        raise LocalityUnavailableError("a router's index answers only that router")

    async def close(self) -> None:
        await self._client.close()

    def _wait(self, call: Call) -> PublishResult:
        try:
            return self._wait_for(call, 2 * CALL_TIMEOUT_S)
        except LocalityUnavailableError:
            raise
        except (TandemError, TimeoutError) as error:
            raise LocalityUnavailableError(f"the router's index did not take the report: {error}") from error


def waiting_in_thread(loop: asyncio.AbstractEventLoop) -> Callable[[Call, float], PublishResult]:
    """Returns a function by which a thread waits for a call that runs in `loop`."""
    return lambda call, timeout_s: asyncio.run_coroutine_threadsafe(call, loop).result(timeout_s)


class Feeds:
    """Reports block events to every index, by one `BlockFeed` each. `emit` may be called from any thread."""

    def __init__(
        self,
        indexes: Sequence[LocalityIndex],
        worker_id: str,
        epoch: int,
        in_thread: InThread = asyncio.to_thread,
    ) -> None:
        self._in_thread = in_thread
        self._feeds = [BlockFeed(index, worker_id, epoch) for index in indexes]

    def emit(self, event: BlockEvent) -> None:
        """Receives block events; a `BlockEventSink`."""
        for feed in self._feeds:
            feed.emit(event)

    async def run(self) -> None:
        """Reports until cancelled; retries while an index is unavailable."""
        await asyncio.gather(*(_report(feed, self._in_thread) for feed in self._feeds))


async def _report(feed: BlockFeed, in_thread: InThread) -> None:
    was_away = was_stale = False
    while True:
        try:
            result = await in_thread(feed.flush)
        except LocalityUnavailableError as error:
            if not was_away:
                logger.warning("the locality index is away, its events are kept: %s", error)
            was_away = True
        else:
            is_stale = result is PublishResult.STALE
            if is_stale and not was_stale:
                logger.error("a later incarnation of this worker reports its blocks; this one does when that one ends")
            was_away, was_stale = False, is_stale
        await asyncio.sleep(STALE_INTERVAL_S if was_stale else FLUSH_INTERVAL_S)
