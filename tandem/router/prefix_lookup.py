"""Router's side of the locality index: looks up the holders of a prompt's prefix without ever failing a request.

Invariant: an answer is the current one of the index, or empty; nothing is cached. An index outside this process is
called in threads, so the event loop never waits for it.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import MappingProxyType
from typing import ParamSpec, TypeVar

from tandem.core.errors import LocalityUnavailableError
from tandem.core.events import BlockEvent
from tandem.locality.base import LocalityIndex, LocalityStats, PublishResult

_LOG = logging.getLogger(__name__)
_NOTHING: Mapping[str, int] = MappingProxyType({})
_NUM_THREADS = 4
_QUICK_EVENTS = 256  # of a report that is applied in the event loop
_P = ParamSpec("_P")
_T = TypeVar("_T")


class PrefixLookup:
    """Access to one index. Used by one event loop.

    Args:
        is_remote: the index is outside this process; calls may block.
        timeout_s: timeout of a look-up, after which the answer is empty.
        write_timeout_s: timeout of a removal.
    """

    def __init__(
        self, index: LocalityIndex, *, is_remote: bool, timeout_s: float = 0.1, write_timeout_s: float = 3.0
    ) -> None:
        self._index = index
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="locality")
        self._timeout_s = timeout_s
        self._write_timeout_s = write_timeout_s
        self._is_away = False
        self.is_remote = is_remote
        self.num_unanswered = 0

    async def leading_blocks(self, hashes: Sequence[bytes]) -> Mapping[str, int]:
        """Returns the number of leading blocks of this chain that each worker holds; empty if the index fails."""
        return await self._asked(self._index.leading_blocks, hashes) if hashes else _NOTHING

    async def resumable_blocks(self, hashes: Sequence[bytes], leading: Mapping[str, int]) -> Mapping[str, int]:
        """Returns the number of leading blocks after which each worker can continue; empty if the index fails."""
        return await self._asked(self._index.resumable_blocks, hashes, leading) if leading else _NOTHING

    async def _asked(
        self, call: Callable[_P, Mapping[str, int]], *args: _P.args, **kwargs: _P.kwargs
    ) -> Mapping[str, int]:
        if not self.is_remote:
            return call(*args, **kwargs)
        try:
            found = await self._in_thread(self._timeout_s, call, *args, **kwargs)
        except LocalityUnavailableError as error:
            self._miss(error)
            return _NOTHING
        if self._is_away:
            self._is_away = False
            _LOG.info("the locality index answers again")
        return found

    async def publish(self, worker_id: str, epoch: int, events: Sequence[BlockEvent], sequence: int) -> PublishResult:
        """Pass a worker's report to the index of this process; long ones do not block the event loop. `epoch` grows
        with each start of the worker; `sequence` numbers its reports.
        """
        if len(events) <= _QUICK_EVENTS:
            return self._index.publish(worker_id, epoch, events, sequence)
        return await self._in_thread(None, self._index.publish, worker_id, epoch, events, sequence)

    async def replace(self, worker_id: str, epoch: int, hashes: Sequence[bytes], sequence: int) -> PublishResult:
        """Pass a worker's snapshot to the index of this process."""
        return await self._in_thread(None, self._index.replace, worker_id, epoch, hashes, sequence)

    async def remove_worker(self, worker_id: str) -> None:
        """Remove a worker from the index.

        Raises:
            LocalityUnavailableError: try again later.
        """
        await self._in_thread(self._write_timeout_s, self._index.remove_worker, worker_id)

    async def stats(self) -> LocalityStats:
        """Returns the fill level of the index.

        Raises:
            LocalityUnavailableError: it does not answer.
        """
        return await self._in_thread(self._timeout_s, self._index.stats)

    def close(self) -> None:
        """End the threads. A call that still waits for Redis ends by its own timeout."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _in_thread(
        self, timeout_s: float | None, call: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs
    ) -> _T:
        future = asyncio.get_running_loop().run_in_executor(self._threads, lambda: call(*args, **kwargs))
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError as error:
            raise LocalityUnavailableError(f"the locality index took longer than {timeout_s} s") from error

    def _miss(self, error: LocalityUnavailableError) -> None:
        self.num_unanswered += 1
        if not self._is_away:
            self._is_away = True
            _LOG.warning("requests are paired without locality until the index answers: %s", error)
