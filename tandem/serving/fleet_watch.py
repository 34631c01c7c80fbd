"""Watches every worker that discovery names: one open stream of news each, from which life and death follow.

Invariant: a stream that breaks, or is silent for `silence_s`, ends the worker for routing at once; only news bring it
back. A worker that discovery no longer names stays as long as its stream lives, so an outage of Redis kills nobody.
News come every `INTERVAL_S`; of a fleet so large that they would fill the router's time they come less often.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Protocol

from tandem.core.errors import (
    IncompatibleProtocolError,
    LocalityUnavailableError,
    TandemError,
    UntrustedPeerError,
    WorkerStoppedError,
)
from tandem.rpc.messages import WorkerAddress, WorkerRecord, WorkerStatus
from tandem.serving.discovery import MAX_WORKERS, Discovery
from tandem.serving.fleet_view import FleetView

_LOG = logging.getLogger(__name__)

INTERVAL_S = 0.25
MAX_REPORTS_PER_S = 4000  # NOTE: each costs both ends of gRPC 0.25 ms together; less than half of it is taken for ours
NEWS_PER_SILENCE = 3  # so many intervals at least fit into the time after which a worker counts as dead
_MOST_OFF = 1.5
_FIRST_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 1.0


class Watchable(Protocol):
    """A client of a worker, as far as watching needs it."""

    def watch(self, interval_s: float) -> AsyncGenerator[WorkerStatus, None]: ...

    async def close(self) -> None: ...


class FleetWatch:
    """Keeps `view` up to date until closed. Everything happens in one event loop.

    Args:
        discoveries: their workers together are watched.
        connect: a new client of a listed worker, closed when its address is watched no more.
        remove: told the id of a worker whose blocks are gone for good; asked again after `LocalityUnavailableError`.
        silence_s: a stream without news for so long is given up.
        poll_s: how often discovery is asked.
        max_reports_per_s: of all workers together; more of them report less often.
    """

    def __init__(
        self,
        discoveries: Sequence[Discovery],
        connect: Callable[[WorkerAddress], Watchable],
        view: FleetView,
        remove: Callable[[str], Awaitable[None]],
        *,
        silence_s: float = 2.0,
        poll_s: float = 1.0,
        max_reports_per_s: float = MAX_REPORTS_PER_S,
    ) -> None:
        self._discoveries = discoveries
        self._connect = connect
        self._view = view
        self._remove = remove
        self._silence_s = silence_s
        self._poll_s = poll_s
        self._max_reports_per_s = max_reports_per_s
        self._streams: dict[str, asyncio.Task[None]] = {}
        self._told: set[str] = set()
        self._wanted = asyncio.Event()
        self._is_blind = False

    def wake(self) -> None:
        """Ask discovery now: somebody new is there."""
        self._wanted.set()

    async def run(self) -> None:
        """Watch until cancelled; then no stream is left open."""
        try:
            while True:
                self._wanted.clear()
                await self._poll()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._poll_s):
                        await self._wanted.wait()
        finally:
            await self._end(list(self._streams))

    async def _poll(self) -> None:
        self._restart_failed()
        records = await self._records()
        for record in records or ():
            address = record.worker.address
            if address not in self._streams and len(self._streams) < MAX_WORKERS:
                self._streams[address] = asyncio.create_task(self._follow(record.worker), name=f"watch {address}")
        if records is not None:
            listed = {record.worker.address for record in records}
            await self._end([a for a in self._streams if a not in listed and not self._view.is_alive_at(a)])
            await self._forget(records)

    async def _records(self) -> Sequence[WorkerRecord] | None:
        """Everybody listed; None when that is not known now."""
        try:
            lists = [await discovery.workers() for discovery in self._discoveries]
        except LocalityUnavailableError as error:
            if not self._is_blind:
                _LOG.warning("new workers are not seen until discovery answers: %s", error)
            self._is_blind = True
            return None
        if self._is_blind:
            _LOG.info("discovery answers again")
        self._is_blind = False
        return [record for records in lists for record in records]

    async def _forget(self, records: Sequence[WorkerRecord]) -> None:
        """Drop whoever is dead for good, unless discovery says otherwise: perhaps only this router cannot reach it."""
        ids = {record.worker.worker_id for record in records}
        addresses = {record.worker.address for record in records}
        for worker_id, address in self._view.forgettable():
            if worker_id in ids or address in addresses:
                continue
            try:
                await self._remove(worker_id)
            except LocalityUnavailableError:
                return
            self._view.forget(worker_id)

    async def _follow(self, worker: WorkerAddress) -> None:
        """Hold a stream open, again and again."""
        backoff_s, address = _FIRST_BACKOFF_S, worker.address
        client = self._connect(worker)
        try:
            while True:
                was_alive = await self._stream(address, client)
                backoff_s = _FIRST_BACKOFF_S if was_alive else min(2 * backoff_s, _MAX_BACKOFF_S)
                await asyncio.sleep(backoff_s)
        finally:
            self._view.lose(address)
            self._told.discard(address)
            await client.close()

    async def _stream(self, address: str, client: Watchable) -> bool:
        """Streams, a new one when news should come at another rate, until one ends; whether they brought news."""
        reason, level = "the worker ended it", logging.WARNING
        try:
            while True:
                await self._take_news(address, client)
        except StopAsyncIteration:
            pass
        except TimeoutError:
            reason = f"silent for {self._silence_s} s"
        except (UntrustedPeerError, IncompatibleProtocolError) as error:
            reason = str(error)
            if address not in self._told:
                self._told.add(address)
                _LOG.error("the worker at %s is given no requests until this is mended: %s", address, reason)
        except WorkerStoppedError:
            reason, level = "it has stopped", logging.INFO
        except TandemError as error:
            reason = str(error)
        was_alive = self._view.is_alive_at(address)
        self._view.lose(address)
        if was_alive:
            _LOG.log(level, "the worker at %s gets no more requests: %s", address, reason)
        elif address not in self._told:
            _LOG.warning("the worker at %s is listed and does not answer: %s", address, reason)
        self._told.add(address)
        return was_alive

    async def _take_news(self, address: str, client: Watchable) -> None:
        """One stream, for as long as its interval suits the size of the fleet."""
        interval_s = self._interval_s()
        async with contextlib.aclosing(client.watch(interval_s)) as news:
            while True:
                async with asyncio.timeout(self._silence_s):
                    status = await anext(news)
                self._view.take(address, status)
                self._told.discard(address)
                if not 1 / _MOST_OFF <= self._interval_s() / interval_s <= _MOST_OFF:
                    return

    def _interval_s(self) -> float:
        """How often each worker should report: never so seldom that its silence could not be told from its rhythm. A
        fleet that is too large for that needs a longer silence, or costs the router more.
        """
        wanted_s = len(self._streams) / self._max_reports_per_s
        return max(INTERVAL_S, min(wanted_s, self._silence_s / NEWS_PER_SILENCE))

    def _restart_failed(self) -> None:
        """A stream's task that ended on its own has met a bug of ours: say so, and watch that worker anew."""
        for address in [address for address, task in self._streams.items() if task.done()]:
            task = self._streams.pop(address)
            if not task.cancelled():
                _LOG.error("watching %s failed", address, exc_info=task.exception())

    async def _end(self, addresses: Sequence[str]) -> None:
        tasks = [self._streams.pop(address) for address in addresses]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
