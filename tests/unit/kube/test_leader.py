"""The election's rounds against leases in memory, on a clock that is turned by hand."""

import asyncio
import dataclasses
import logging
import random
from collections.abc import Awaitable, Callable

import pytest

from tandem.core.clock import ManualClock
from tandem.kube.call import KubeCall
from tandem.kube.candidate import LeaseTerms
from tandem.kube.errors import ConflictError, ForbiddenError, KubeError, KubeUnavailableError, NotFoundError
from tandem.kube.leader import LeaderElection, own_identity
from tandem.kube.lease import Lease

CALL = KubeCall("update", "leases", "n", "planner", "coordination.k8s.io")
TERMS = LeaseTerms(lease_s=15, renew_deadline_s=10, retry_s=2)


class MemoryLeases:
    """One lease with versions. `fail`: raised instead of the next calls. `before`: done before each call."""

    def __init__(self) -> None:
        self.lease: Lease | None = None
        self.fail: KubeError | None = None
        self.before: Callable[[], None] = lambda: None
        self._version = 0

    async def read_lease(self, name: str) -> Lease:
        self._may_fail()
        if self.lease is None:
            raise NotFoundError(CALL, "404")
        return self.lease

    async def create_lease(self, lease: Lease) -> Lease:
        self._may_fail()
        if self.lease is not None:
            raise ConflictError(CALL, "409")
        return self._put(lease)

    async def replace_lease(self, lease: Lease) -> Lease:
        self._may_fail()
        if self.lease is None or self.lease.resource_version != lease.resource_version:
            raise ConflictError(CALL, "409")
        return self._put(lease)

    def take(self, holder: str) -> None:
        """Somebody else's write."""
        assert self.lease is not None
        self._put(dataclasses.replace(self.lease, holder=holder))

    def _put(self, lease: Lease) -> Lease:
        self._version += 1
        self.lease = dataclasses.replace(lease, resource_version=str(self._version))
        return self.lease

    def _may_fail(self) -> None:
        self.before()
        if self.fail is not None:
            raise self.fail


def election(leases: MemoryLeases, clock: ManualClock, identity: str = "a") -> LeaderElection:
    return LeaderElection(leases, "planner", identity, TERMS, clock=clock, wall_s=lambda: 1e9, jitter=random.Random(1))


def leads(one: LeaderElection) -> bool:
    return one.is_leader


def play(scenario: Callable[[MemoryLeases, ManualClock, LeaderElection], Awaitable[None]]) -> None:
    async def main() -> None:
        leases, clock = MemoryLeases(), ManualClock(100.0)
        await scenario(leases, clock, election(leases, clock))

    asyncio.run(main())


def test_the_first_makes_the_lease_and_leads_until_its_deadline() -> None:
    async def scenario(leases: MemoryLeases, clock: ManualClock, first: LeaderElection) -> None:
        assert not leads(first)
        await first.round()
        assert leases.lease == Lease(
            name="planner", holder="a", duration_s=15, acquired_s=1e9, renewed_s=1e9, resource_version="1"
        )
        assert first.remaining_s == 10.0
        clock.advance(9.9)
        assert leads(first)
        clock.advance(0.1)
        assert not leads(first)

    play(scenario)


def test_time_that_a_call_takes_is_counted() -> None:
    async def scenario(leases: MemoryLeases, clock: ManualClock, first: LeaderElection) -> None:
        await first.round()
        leases.before = lambda: clock.advance(4)
        await first.round()
        assert first.remaining_s == 6.0

    play(scenario)


def test_an_outage_ends_it_by_the_clock_and_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(leases: MemoryLeases, clock: ManualClock, first: LeaderElection) -> None:
        await first.round()
        leases.fail = KubeUnavailableError(CALL, "away")
        for number in range(6):
            clock.advance(2)
            await first.round()
            assert first.is_leader == (number < 4)
        leases.fail = None
        await first.round()
        assert leads(first)

    with caplog.at_level(logging.INFO, "tandem.kube.leader"):
        play(scenario)
    said = [record.getMessage() for record in caplog.records]
    assert [line.split(" (")[0] for line in said if "lead" in line] == ["a leads", "a leads no more", "a leads"]
    assert sum("away" in line for line in said) == 1


def test_a_missing_rule_is_said(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(leases: MemoryLeases, clock: ManualClock, first: LeaderElection) -> None:
        leases.fail = ForbiddenError(CALL, "403; give the account a Role")
        for _ in range(3):
            await first.round()
        assert not leads(first)

    with caplog.at_level(logging.WARNING):
        play(scenario)
    assert [record.getMessage().count("give the account a Role") for record in caplog.records] == [1]


def test_a_lease_taken_by_somebody_else_ends_it_at_once() -> None:
    async def scenario(leases: MemoryLeases, clock: ManualClock, first: LeaderElection) -> None:
        await first.round()
        leases.take("b")
        await first.round()
        assert not leads(first)
        assert first.holder == "b"
        clock.advance(14.9)
        await first.round()
        assert leases.lease is not None
        assert leases.lease.holder == "b"
        clock.advance(0.1)
        await first.round()
        assert leads(first)
        assert leases.lease.num_transitions == 1

    play(scenario)


def test_of_two_that_bid_at_once_one_wins() -> None:
    async def scenario(leases: MemoryLeases, clock: ManualClock, first: LeaderElection) -> None:
        second = election(leases, clock, "b")
        for _ in range(3):
            await asyncio.gather(first.round(), second.round())
            assert first.is_leader != second.is_leader

    play(scenario)


def test_a_lease_that_was_deleted_is_made_again() -> None:
    async def scenario(leases: MemoryLeases, clock: ManualClock, first: LeaderElection) -> None:
        await first.round()
        leases.lease = None
        await first.round()
        assert leads(first)
        assert leases.lease is not None

    play(scenario)


def test_a_lease_that_somebody_else_made_again_ends_it_at_once() -> None:
    async def scenario(leases: MemoryLeases, clock: ManualClock, first: LeaderElection) -> None:
        await first.round()
        calls = iter([None, Lease(name="planner", holder="b", duration_s=15, resource_version="9")])

        def before() -> None:
            leases.lease = next(calls)

        leases.before = before
        await first.round()
        assert not leads(first)

    play(scenario)


def test_whoever_stops_leaves_the_lease_free() -> None:
    async def scenario(leases: MemoryLeases, clock: ManualClock, first: LeaderElection) -> None:
        running = asyncio.create_task(first.run())
        async with asyncio.timeout(10):
            while not first.is_leader:
                await asyncio.sleep(0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert not leads(first)
        assert leases.lease is not None
        assert leases.lease.holder == ""
        second = election(leases, clock, "b")
        await second.round()
        assert leads(second)

    play(scenario)


def test_stopping_during_an_outage_is_no_error() -> None:
    async def scenario(leases: MemoryLeases, clock: ManualClock, first: LeaderElection) -> None:
        running = asyncio.create_task(first.run())
        async with asyncio.timeout(10):
            while not first.is_leader:
                await asyncio.sleep(0)
        leases.fail = KubeUnavailableError(CALL, "away")
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert not leads(first)

    play(scenario)


def test_no_two_processes_are_the_same_candidate() -> None:
    assert own_identity("pod") != own_identity("pod")
    assert own_identity("pod").startswith("pod_")


def test_a_renewal_that_lands_while_it_resigns_is_taken_back_too() -> None:
    """Cancelled in the middle of a renewal, it does not know of what the server has written."""

    async def main() -> None:
        leases, clock = MemoryLeases(), ManualClock(100.0)
        one = election(leases, clock)
        await one.round()
        assert one.is_leader
        reads = 0

        def renewal_lands() -> None:
            nonlocal reads
            reads += 1
            if reads == 2:  # between its reading and its writing
                leases.take("a")

        running = asyncio.create_task(one.run())
        await asyncio.sleep(0)
        leases.before = renewal_lands
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert leases.lease is not None
        assert (leases.lease.holder, one.is_leader) == ("", False)

    asyncio.run(main())


class HangingLeases(MemoryLeases):
    """Creates, and never says so."""

    def __init__(self) -> None:
        super().__init__()
        self.made = asyncio.Event()

    async def create_lease(self, lease: Lease) -> Lease:
        made = await super().create_lease(lease)
        self.made.set()
        await asyncio.Event().wait()
        return made


def test_a_lease_made_by_a_call_that_was_cut_is_let_go_of() -> None:
    async def main() -> None:
        leases = HangingLeases()
        one = election(leases, ManualClock(100.0))
        running = asyncio.create_task(one.run())
        await leases.made.wait()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert leases.lease is not None
        assert leases.lease.holder == ""

    asyncio.run(main())
