"""Watches every discovered worker by an open stream of its status updates, which shows whether it is alive.

Used by routers and the planner. Invariant: a worker whose stream breaks, or is silent for `silence_s`, gets no requests
until its next update. A worker that discovery no longer lists stays as long as its stream is alive, so an outage of
Redis removes no worker. Updates arrive every `INTERVAL_S`: more often for a short `silence_s`, and less often if the
fleet is so large that they would take too much of the router's time.
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
from tandem.process.discovery import MAX_WORKERS, Discovery
from tandem.process.fleet_view import FleetView
from tandem.rpc.messages import WorkerAddress, WorkerRecord, WorkerStatus

_LOG = logging.getLogger(__name__)

INTERVAL_S = 0.25
MAX_REPORTS_PER_S = 4000  # NOTE: each costs both ends of gRPC 0.25 ms together; less than half of it is taken for ours
UPDATES_PER_SILENCE = 3  # least number of update intervals in `silence_s`
_MOST_OFF = 1.5  # factor by which a stream's interval may differ from the wanted one before the stream is opened anew
_FIRST_BACKOFF_S = 0.1
MAX_BACKOFF_S = 1.0  # before a stream that ended is opened again


class Watchable(Protocol):
    """Part of a worker's client that watching needs."""

    def watch(self, interval_s: float) -> AsyncGenerator[WorkerStatus, None]: ...

    async def close(self) -> None: ...


class FleetWatch:
    """Keeps `view` up to date until closed. Everything happens in one event loop.

    Args:
        discoveries: sources of workers; the union is watched.
        connect: creates a client of a listed worker, which is closed when its address is no longer watched.
        remove: called with the id of a worker whose blocks are gone; retried after `LocalityUnavailableError`.
        silence_s: a stream without updates for this long is closed.
        poll_s: interval of reading the discoveries.
        max_reports_per_s: limit of updates from all workers together; a larger fleet reports less often.
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
        """Reads the discoveries now, for example because a worker was added."""
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
        """Returns all listed workers; None if the list is not available now."""
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
        """Remove workers that have long been dead, unless they are still listed: perhaps only this router lost them."""
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
        """Keep a stream to one worker open, reopening it after each failure."""
        backoff_s, address = _FIRST_BACKOFF_S, worker.address
        client = self._connect(worker)
        try:
            while True:
                was_alive = await self._stream(address, client)
                backoff_s = _FIRST_BACKOFF_S if was_alive else min(2 * backoff_s, MAX_BACKOFF_S)
                await asyncio.sleep(backoff_s)
        finally:
            self._view.mark_lost(address)
            self._told.discard(address)
            await client.close()

    async def _stream(self, address: str, client: Watchable) -> bool:
        """Read streams, opening a new one when the update interval changes, until one ends; True if any had updates."""
        reason, level = "the worker ended it", logging.WARNING
        try:
            while True:
                await self._take_statuses(address, client)
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
        self._view.mark_lost(address)
        if was_alive:
            _LOG.log(level, "the worker at %s gets no more requests: %s", address, reason)
        elif address not in self._told:
            _LOG.warning("the worker at %s is listed and does not answer: %s", address, reason)
        self._told.add(address)
        return was_alive

    async def _take_statuses(self, address: str, client: Watchable) -> None:
        """Read one stream, as long as its interval suits the size of the fleet."""
        interval_s = self._interval_s()
        async with contextlib.aclosing(client.watch(interval_s)) as update:
            while True:
                async with asyncio.timeout(self._silence_s):
                    status = await anext(update)
                self._view.update(address, status)
                self._told.discard(address)
                if not 1 / _MOST_OFF <= self._interval_s() / interval_s <= _MOST_OFF:
                    return

    def _interval_s(self) -> float:
        """Returns the interval between a worker's updates: at most `silence_s / UPDATES_PER_SILENCE`, so that silence
        is noticed.

        A larger fleet needs a longer `silence_s`, or takes more of the router's time.
        """
        wanted_s = len(self._streams) / self._max_reports_per_s
        return min(max(INTERVAL_S, wanted_s), self._silence_s / UPDATES_PER_SILENCE)

    def _restart_failed(self) -> None:
        """Restart stream tasks that ended on their own, which is a bug, and log it."""
        for address in [address for address, task in self._streams.items() if task.done()]:
            task = self._streams.pop(address)
            if not task.cancelled():
                _LOG.error("watching %s failed", address, exc_info=task.exception())

    async def _end(self, addresses: Sequence[str]) -> None:
        tasks = [self._streams.pop(address) for address in addresses]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
