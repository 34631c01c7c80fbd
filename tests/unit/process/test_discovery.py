import asyncio
import random
from collections.abc import Coroutine

import pytest

from tandem.core.clock import ManualClock
from tandem.core.errors import CapacityError, InvalidRequestError, LocalityUnavailableError
from tandem.process.discovery import (
    EmbeddedDiscovery,
    RouterDiscovery,
    StaticDiscovery,
)
from tandem.process.discovery_choice import open_discovery
from tandem.process.discovery_redis import RedisDiscovery
from tandem.process.ports import free_ports
from tandem.router.process import serving_router
from tandem.rpc.messages import Registration, WorkerAddress
from tests.helpers.secret import AS_WORKER
from tests.unit.process.stub_workers import PATIENT_S, record, router_settings

SETTINGS = router_settings()


def run(scenario: Coroutine[None, None, None]) -> None:
    asyncio.run(scenario)


def test_a_router_keeps_only_so_many_and_room_comes_back_with_time() -> None:
    async def scenario() -> None:
        clock = ManualClock()
        discovery = EmbeddedDiscovery(clock, ttl_s=3.0, max_workers=2)
        await discovery.announce(record("a"))
        clock.advance(1.0)
        await discovery.announce(record("b"))
        with pytest.raises(CapacityError):
            await discovery.announce(record("c"))
        await discovery.announce(record("b"))
        clock.advance(2.0)
        await discovery.announce(record("c"))
        assert {known.worker.worker_id for known in await discovery.workers()} == {"b", "c"}

    run(scenario())


def test_one_router_that_answers_is_enough() -> None:
    async def scenario() -> None:
        (nobody,) = free_ports(1, "127.0.0.1", random.Random(1))
        async with serving_router(SETTINGS) as router:
            discovery = RouterDiscovery(
                [f"127.0.0.1:{nobody}", router.address], timeout_s=PATIENT_S, credentials=AS_WORKER
            )
            await discovery.announce(record("p0"))
            assert list(await discovery.workers()) == [record("p0")]
            await discovery.withdraw(record("p0"))
            assert list(await discovery.workers()) == []
            await discovery.close()

    run(scenario())


def test_no_router_at_all_is_said() -> None:
    async def scenario() -> None:
        discovery = RouterDiscovery(
            [f"127.0.0.1:{port}" for port in free_ports(2, "127.0.0.1", random.Random(2))],
            AS_WORKER,
            timeout_s=PATIENT_S,
        )
        with pytest.raises(LocalityUnavailableError):
            await discovery.announce(record("p0"))
        with pytest.raises(LocalityUnavailableError):
            await discovery.withdraw(record("p0"))
        assert list(await discovery.workers()) == []
        await discovery.close()

    run(scenario())


def test_a_worker_knows_of_others_what_any_router_knows() -> None:
    async def scenario() -> None:
        async with serving_router(SETTINGS) as first, serving_router(SETTINGS) as second:
            for router, name in ((first, "p0"), (second, "p1")):
                await router.service.register(Registration(record(name)))
            discovery = RouterDiscovery([first.address, second.address], AS_WORKER, timeout_s=PATIENT_S)
            await discovery.announce(record("d0", role="decode"))
            assert {known.worker.worker_id for known in await discovery.workers()} == {"p0", "p1", "d0"}
            await discovery.close()

    run(scenario())


def test_of_two_incarnations_the_one_that_a_router_told_last_is_known() -> None:
    """A router that has stopped still named the former one, and came after the router that knew better."""

    async def scenario() -> None:
        clock = ManualClock()
        async with serving_router(SETTINGS) as first:
            async with serving_router(SETTINGS) as second:
                addresses = [first.address, second.address]
                discovery = RouterDiscovery(addresses, AS_WORKER, clock=clock, timeout_s=PATIENT_S)
                for router in (first, second):
                    await router.service.register(Registration(record("p0", "1")))
                await discovery.announce(record("d0", role="decode"))
            await first.service.register(Registration(record("p0", "2")))
            clock.advance(1.0)
            await discovery.announce(record("d0", role="decode"))
            assert record("p0", "2") in await discovery.workers()
            assert record("p0", "1") not in await discovery.workers()
            await discovery.close()

    run(scenario())


def test_what_routers_said_long_ago_is_not_repeated() -> None:
    async def scenario() -> None:
        clock = ManualClock()
        async with serving_router(SETTINGS) as router:
            discovery = RouterDiscovery(
                [router.address], clock=clock, ttl_s=3.0, timeout_s=PATIENT_S, credentials=AS_WORKER
            )
            await discovery.announce(record("p0"))
            clock.advance(2.9)
            assert list(await discovery.workers()) == [record("p0")]
            clock.advance(0.1)
            assert list(await discovery.workers()) == []
            await discovery.close()

    run(scenario())


def test_a_list_that_is_long_is_asked_for_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """All look together as often as one of a hundred looks, whatever their number; signs of life go on."""
    monkeypatch.setattr("tandem.process.discovery._SQUARE_S", 5.0)

    async def scenario() -> None:
        clock = ManualClock()
        async with serving_router(SETTINGS) as router:
            discovery = RouterDiscovery(
                [router.address], clock=clock, ttl_s=3.0, timeout_s=PATIENT_S, credentials=AS_WORKER
            )
            await discovery.announce(record("p0"))
            await router.service.register(Registration(record("p1")))
            clock.advance(2.4)
            await discovery.announce(record("p0", address="127.0.0.1:2"))
            assert list(await discovery.workers()) == [record("p0", address="127.0.0.1:2")]
            told = await router.service.register(Registration(record("p1")))
            assert record("p0", address="127.0.0.1:2") in told
            clock.advance(5.2)
            await discovery.announce(record("p0"))
            assert {known.worker.worker_id for known in await discovery.workers()} == {"p0", "p1"}
            await discovery.close()

    run(scenario())


def test_an_announcement_is_known_at_once_though_routers_are_not_asked_again() -> None:
    """Until its next look, the list named the former incarnation of a worker that had just been announced through it.
    So did the answer of a router that had stopped meanwhile.
    """

    async def scenario() -> None:
        clock = ManualClock()
        async with serving_router(SETTINGS) as first:
            async with serving_router(SETTINGS) as second:
                addresses = [first.address, second.address]
                discovery = RouterDiscovery(addresses, AS_WORKER, clock=clock, timeout_s=PATIENT_S)
                await discovery.announce(record("p0"))
            for incarnation in ("2", "3"):
                await discovery.announce(record("p0", incarnation))
                assert list(await discovery.workers()) == [record("p0", incarnation)]
            await discovery.withdraw(record("p0", "3"))
            assert list(await discovery.workers()) == []
            await discovery.close()

    run(scenario())


def test_known_addresses_are_named_once_and_stay() -> None:
    async def scenario() -> None:
        discovery = StaticDiscovery(["h:1", "h:2", "h:1"])
        await discovery.announce(record("p0"))
        await discovery.withdraw(record("p0"))
        assert [known.worker for known in await discovery.workers()] == [
            WorkerAddress("", "h:1"),
            WorkerAddress("", "h:2"),
        ]

    run(scenario())


def test_redis_is_chosen_where_it_is_named() -> None:
    async def scenario() -> None:
        for discovery, kind in (
            (open_discovery("redis://127.0.0.1:1", ["h:1"], AS_WORKER), RedisDiscovery),
            (open_discovery(None, ["h:1"], AS_WORKER), RouterDiscovery),
        ):
            assert isinstance(discovery, kind)
            await discovery.close()
        with pytest.raises(InvalidRequestError):
            open_discovery(None, [], AS_WORKER)

    run(scenario())
