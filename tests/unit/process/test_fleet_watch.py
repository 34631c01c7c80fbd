"""The watch over real gRPC: who dies in whatever way is out in time, and who lives is kept whatever discovery says."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence

import pytest

from tandem.core.clock import SystemClock
from tandem.core.errors import LocalityUnavailableError, WorkerLostError
from tandem.process.fleet_view import FleetView
from tandem.process.fleet_watch import MAX_REPORTS_PER_S, UPDATES_PER_SILENCE, FleetWatch
from tandem.routing.admission import AdmissionLimits
from tandem.routing.calibration import Calibration
from tandem.routing.fleet import Fleet
from tandem.routing.snapshot import Links, Role
from tandem.rpc.client import WorkerClient, client_of
from tandem.rpc.messages import WorkerAddress, WorkerRecord, WorkerStatus
from tests.helpers.secret import AS_ROUTER
from tests.unit.process.stub_workers import StubWorker, eventually, record, serving_worker, status
from tests.unit.routing.builders import FAST, LINK

SILENCE_S = 0.6
LONG_S = 20.0  # NOTE: a slow machine makes no silence of it


class Listed:
    """A discovery that says what it is told to say."""

    def __init__(self) -> None:
        self.records: list[WorkerRecord] | None = []
        self.num_asked = 0

    async def workers(self) -> Sequence[WorkerRecord]:
        self.num_asked += 1
        if self.records is None:
            raise LocalityUnavailableError("away")
        return list(self.records)

    async def announce(self, record: WorkerRecord) -> None: ...

    async def withdraw(self, record: WorkerRecord) -> None: ...

    async def close(self) -> None: ...


class Watched:
    """A running watch and what it found."""

    def __init__(
        self, forget_s: float = 60.0, silence_s: float = LONG_S, max_reports_per_s: float = MAX_REPORTS_PER_S
    ) -> None:
        calibration = Calibration(FAST)
        self.fleet = Fleet(AdmissionLimits(), Links(LINK), calibration.speed)
        self.view = FleetView(self.fleet, calibration, SystemClock(), forget_s=forget_s)
        self.listed = Listed()
        self.removed: list[str] = []
        self.index_is_away = False
        self.clients: list[WorkerClient] = []
        self.watch = FleetWatch(
            [self.listed],
            self._connect,
            self.view,
            self._remove,
            silence_s=silence_s,
            poll_s=0.02,
            max_reports_per_s=max_reports_per_s,
        )

    def lists(self, *addresses: str) -> None:
        self.listed.records = [record(f"name of {address}", address=address) for address in addresses]

    def incarnations(self) -> dict[str, str]:
        """Incarnations of the workers that are listed as alive, by worker id."""
        return {
            one.status.worker.worker_id: one.status.worker.incarnation for one in self.view.listings() if one.is_alive
        }

    async def polled_again(self) -> None:
        """Discovery was asked, and its answer acted upon."""
        num_asked = self.listed.num_asked
        await eventually(lambda: self.listed.num_asked >= num_asked + 2)

    def _connect(self, worker: WorkerAddress) -> WorkerClient:
        self.clients.append(client_of(worker, AS_ROUTER))
        return self.clients[-1]

    async def _remove(self, worker_id: str) -> None:
        if self.index_is_away:
            raise LocalityUnavailableError("away")
        self.removed.append(worker_id)


@contextlib.asynccontextmanager
async def watching(**options: float) -> AsyncIterator[Watched]:
    watched = Watched(**options)
    task = asyncio.create_task(watched.watch.run())
    try:
        yield watched
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def run(scenario: Callable[[], Coroutine[None, None, None]]) -> None:
    asyncio.run(scenario())


def test_listed_workers_are_watched_and_streams_end_with_the_watch() -> None:
    async def scenario() -> None:
        p, d = StubWorker(status("p")), StubWorker(status("d", Role.DECODE))
        async with serving_worker(p) as at_p, serving_worker(d) as at_d:
            async with watching() as watched:
                watched.lists(at_p.address, at_d.address)
                await eventually(lambda: watched.incarnations() == {"p": "1", "d": "1"})
                assert watched.fleet.num_workers() == 2
                d.tell(status("d", Role.DECODE, lifecycle="draining"))
                await eventually(lambda: watched.incarnations() == {"p": "1"})
            await eventually(lambda: p.num_watchers == d.num_watchers == 0)
            for client in watched.clients:
                with pytest.raises(WorkerLostError, match="closed"):
                    await client.status()

    run(scenario)


def test_a_worker_that_dies_is_out_at_once_and_back_when_it_is_back() -> None:
    async def scenario() -> None:
        async with watching() as watched:
            async with serving_worker(StubWorker(status("p"))) as server:
                watched.lists(server.address)
                await eventually(lambda: watched.incarnations() == {"p": "1"})
            died_s = time.monotonic()
            await eventually(lambda: watched.incarnations() == {})
            assert time.monotonic() - died_s < LONG_S / 4
            assert watched.fleet.num_workers() == 0
            async with serving_worker(StubWorker(status("p", incarnation="2", epoch=2)), server.address):
                await eventually(lambda: watched.incarnations() == {"p": "2"})

    run(scenario)


def test_a_worker_that_stops_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Regression: while Ctrl-C stopped them, each was reported as lost."""
    caplog.set_level(logging.INFO, logger="tandem.process.fleet_watch")

    async def scenario() -> None:
        async with watching() as watched:
            async with serving_worker(StubWorker(status("p"))) as server:
                watched.lists(server.address)
                await eventually(lambda: watched.incarnations() == {"p": "1"})
            await eventually(lambda: watched.incarnations() == {})
            ours = [record for record in caplog.records if record.name == "tandem.process.fleet_watch"]
            said = [(record.levelno, record.getMessage()) for record in ours]
            assert said == [(logging.INFO, f"the worker at {server.address} gets no more requests: it has stopped")]

    run(scenario)


def test_a_worker_that_falls_silent_is_out_in_time_and_back_when_it_speaks() -> None:
    async def scenario() -> None:
        async with watching(silence_s=SILENCE_S) as watched, contextlib.AsyncExitStack() as opened:
            stub = StubWorker(status("p"))
            server = await opened.enter_async_context(serving_worker(stub))
            watched.lists(server.address)
            await eventually(lambda: watched.incarnations() == {"p": "1"})
            stub.hush()
            silent_s = time.monotonic()
            await eventually(lambda: watched.incarnations() == {})
            assert time.monotonic() - silent_s < SILENCE_S + 5  # NOTE: gRPC's own pings need 15
            stub.hush(False)
            await eventually(lambda: watched.incarnations() == {"p": "1"})

    run(scenario)


@pytest.mark.parametrize("outage", ["away", "empty"])
def test_discovery_that_is_away_or_empty_kills_nobody(outage: str) -> None:
    async def scenario() -> None:
        async with watching() as watched, serving_worker(StubWorker(status("p"))) as server:
            watched.lists(server.address)
            await eventually(lambda: watched.incarnations() == {"p": "1"})
            watched.listed.records = None if outage == "away" else []
            await watched.polled_again()
            assert watched.incarnations() == {"p": "1"}
            watched.lists(server.address)
            await watched.polled_again()
            assert watched.incarnations() == {"p": "1"}

    run(scenario)


def test_whoever_is_dead_and_listed_no_more_is_not_called_any_more() -> None:
    async def scenario() -> None:
        async with watching() as watched:
            async with serving_worker(StubWorker(status("p"))) as server:
                watched.lists(server.address)
                await eventually(lambda: watched.incarnations() == {"p": "1"})
                watched.lists()
                await watched.polled_again()
            await eventually(lambda: watched.incarnations() == {})
            await watched.polled_again()
            late = StubWorker(status("p", incarnation="2"))
            async with serving_worker(late, server.address):
                await watched.polled_again()
                assert late.num_watchers == 0
                watched.lists(server.address)
                await eventually(lambda: watched.incarnations() == {"p": "2"})

    run(scenario)


def test_blocks_are_removed_once_a_worker_is_gone_for_good_and_never_while_it_is_listed() -> None:
    async def scenario() -> None:
        async with watching(forget_s=0.0) as watched:
            async with serving_worker(StubWorker(status("p"))) as server:
                watched.listed.records = [record("p", address=server.address)]
                await eventually(lambda: watched.incarnations() == {"p": "1"})
            await eventually(lambda: watched.incarnations() == {})
            await watched.polled_again()
            watched.listed.records = None
            await watched.polled_again()
            assert watched.removed == []
            watched.index_is_away = True
            watched.lists()
            await watched.polled_again()
            assert watched.removed == []
            assert len(watched.view.listings()) == 1
            watched.index_is_away = False
            await eventually(lambda: watched.removed == ["p"])
            await watched.polled_again()
            assert watched.removed == ["p"]
            assert len(watched.view.listings()) == 0

    run(scenario)


def test_whoever_was_replaced_at_its_address_is_removed_soon() -> None:
    async def scenario() -> None:
        async with watching() as watched, serving_worker(StubWorker(status("old"))) as server:
            watched.lists(server.address)
            await eventually(lambda: watched.incarnations() == {"old": "1"})
            await server.stop(0)
            async with serving_worker(StubWorker(status("new")), server.address):
                await eventually(lambda: watched.incarnations() == {"new": "1"})
                await eventually(lambda: watched.removed == ["old"])

    run(scenario)


def test_a_worker_that_talks_nonsense_is_not_believed_and_hurts_nobody_else() -> None:
    async def scenario() -> None:
        odd, good = StubWorker(status("")), StubWorker(status("d"))
        async with watching() as watched, serving_worker(odd) as at_odd, serving_worker(good) as at_good:
            watched.lists(at_odd.address, at_good.address)
            await eventually(lambda: watched.incarnations() == {"d": "1"})
            odd.tell(status("p"))
            await eventually(lambda: watched.incarnations() == {"d": "1", "p": "1"})

    run(scenario)


class Timed(StubWorker):
    """Remembers how often it was asked to report."""

    def __init__(self, name: str) -> None:
        super().__init__(status(name))
        self.intervals_s: list[float] = []

    def watch(self, interval_s: float) -> AsyncIterator[WorkerStatus]:
        self.intervals_s.append(interval_s)
        return super().watch(interval_s)


def test_a_larger_fleet_reports_less_often_and_nobody_is_lost_when_that_changes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Four reports a second: one worker may send all of them, of three each one in 0.75 s; past 1 s is too seldom."""

    async def scenario() -> None:
        stubs = [Timed(f"w{i}") for i in range(6)]
        async with contextlib.AsyncExitStack() as opened:
            addresses = [(await opened.enter_async_context(serving_worker(stub))).address for stub in stubs]
            watched = await opened.enter_async_context(watching(silence_s=3.0, max_reports_per_s=4.0))
            watched.lists(addresses[0])
            await eventually(lambda: len(watched.incarnations()) == 1)
            watched.lists(*addresses[:3])
            await eventually(lambda: stubs[0].intervals_s == [0.25, 0.75])
            watched.lists(*addresses)
            await eventually(lambda: stubs[5].intervals_s == [1.0] and len(watched.incarnations()) == 6)
            assert "is lost" not in caplog.text

    run(scenario)


def test_a_short_silence_has_three_reports_too() -> None:
    async def scenario() -> None:
        stub = Timed("w")
        async with watching(silence_s=0.5) as watched, serving_worker(stub) as worker:
            watched.lists(worker.address)
            await eventually(lambda: bool(stub.intervals_s))
            assert max(stub.intervals_s) <= 0.5 / UPDATES_PER_SILENCE + 1e-9

    run(scenario)


def test_a_worker_that_is_listed_and_never_answers_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """Regression: of one that does not accept the router's certificate nothing was logged at all."""

    def told() -> list[str]:
        return [r.getMessage() for r in caplog.records if r.name == "tandem.process.fleet_watch"]

    async def scenario() -> None:
        async with serving_worker(StubWorker(status("p"))) as server:
            address = server.address
        async with watching() as watched:
            watched.lists(address)
            await eventually(lambda: bool(told()))
            await watched.polled_again()
            async with serving_worker(StubWorker(status("p")), address):
                await eventually(lambda: watched.incarnations() == {"p": "1"})
        (line,) = told()
        assert line.startswith(f"the worker at {address} is listed and does not answer: ")

    run(scenario)


def test_a_worker_that_refuses_the_router_is_logged_once_and_used_when_it_is_mended(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Regression: it was not used, and nothing told an operator why."""

    async def scenario() -> None:
        async with watching() as watched:
            async with serving_worker(StubWorker(status("p")), secret=b"the secret of another cluster") as server:
                watched.lists(server.address)
                await eventually(lambda: bool(caplog.records))
                await watched.polled_again()
                (line,) = (r.getMessage() for r in caplog.records if r.name == "tandem.process.fleet_watch")
                assert line.startswith(f"the worker at {server.address} is given no requests until this is mended")
                assert "give every process the same cluster secret" in line
            async with serving_worker(StubWorker(status("p")), server.address):
                await eventually(lambda: watched.incarnations() == {"p": "1"})

    with caplog.at_level(logging.ERROR, logger="tandem.process.fleet_watch"):
        run(scenario)
