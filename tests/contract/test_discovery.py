"""Contract of every `Discovery`, in the router's process, through routers and in a real Redis."""

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import pytest

from tandem.core.clock import ManualClock
from tandem.core.errors import ConfigurationError, InvalidRequestError, LocalityUnavailableError
from tandem.kube.api import open_api
from tandem.kube.pod_watch import WatchTerms
from tandem.process.discovery import Discovery, EmbeddedDiscovery, RouterDiscovery
from tandem.process.discovery_kubernetes import KubernetesDiscovery
from tandem.process.discovery_redis import RedisDiscovery
from tandem.router.process import serving_router
from tandem.rpc.messages import WorkerAddress, WorkerRecord
from tandem.simulation.redis import SimulatedRedis
from tests.helpers.kube_fake import running_fake
from tests.helpers.redis_server import RedisServer, running_redis
from tests.helpers.secret import AS_WORKER
from tests.unit.process.stub_workers import PATIENT_S, record, router_settings

KEY = "{tandem}:workers"


@dataclass(frozen=True)
class Backend:
    """`open`: one more participant of the same deployment, which looks who is there whenever it announces.
    `expire`: let all that was announced until now run out.
    """

    open: Callable[[], Discovery]
    expire: Callable[[], Awaitable[object]]


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


@contextlib.asynccontextmanager
async def embedded() -> AsyncIterator[Backend]:
    clock = ManualClock()
    discovery = EmbeddedDiscovery(clock, ttl_s=3.0)

    async def expire() -> None:
        clock.advance(3.0)

    yield Backend(lambda: discovery, expire)
    await discovery.close()


class StridingClock(ManualClock):
    """A clock that moves at every look, by more than the time between two looks of a worker and by less than a TTL.

    NOTE: by the machine's clock, a quick one announces again before it is time to look again.
    """

    def now_s(self) -> float:
        self.advance(0.01)
        return super().now_s()


@contextlib.asynccontextmanager
async def through_routers() -> AsyncIterator[Backend]:
    async with contextlib.AsyncExitStack() as opened:
        routers = [await opened.enter_async_context(serving_router(router_settings())) for _ in range(2)]

        def open_one() -> Discovery:
            addresses = [router.address for router in routers]
            discovery = RouterDiscovery(addresses, AS_WORKER, clock=StridingClock(), timeout_s=PATIENT_S)
            opened.push_async_callback(discovery.close)
            return discovery

        async def expire() -> None:
            raise NotImplementedError

        yield Backend(open_one, expire)


@contextlib.asynccontextmanager
async def in_redis(server: RedisServer) -> AsyncIterator[Backend]:
    async with contextlib.AsyncExitStack() as opened:
        with contextlib.closing(server.client()) as plain:
            plain.flushall()

        def open_one() -> Discovery:
            discovery = RedisDiscovery(server.url, AS_WORKER, ttl_s=1.0, timeout_s=PATIENT_S)
            opened.push_async_callback(discovery.close)
            return discovery

        async def expire() -> None:
            """By Redis' own clock, which has no hands to turn."""
            looking = open_one()
            async with asyncio.timeout(PATIENT_S):
                while await looking.workers():
                    await asyncio.sleep(0.02)

        yield Backend(open_one, expire)


@contextlib.asynccontextmanager
async def in_simulated_redis() -> AsyncIterator[Backend]:
    """The server of `tandem.simulation`, at a real port."""
    redis = SimulatedRedis(time.time)
    loop = asyncio.get_running_loop()
    async with await loop.create_server(redis.session, "127.0.0.1", 0) as server, contextlib.AsyncExitStack() as opened:
        url = f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}/0"

        def open_one() -> Discovery:
            discovery = RedisDiscovery(url, AS_WORKER, ttl_s=1.0, timeout_s=PATIENT_S)
            opened.push_async_callback(discovery.close)
            return discovery

        async def expire() -> None:
            redis.clock_offset_s += 1.0

        yield Backend(open_one, expire)


@contextlib.asynccontextmanager
async def in_kubernetes() -> AsyncIterator[Backend]:
    """For whom announcing is nothing: its own tests have what else it promises."""
    async with running_fake() as fake, contextlib.AsyncExitStack() as opened:

        def open_one() -> Discovery:
            discovery = KubernetesDiscovery(open_api(fake.access(), timeout_s=PATIENT_S), "app", first_wait_s=PATIENT_S)
            opened.push_async_callback(discovery.close)
            return discovery

        async def expire() -> None:
            raise NotImplementedError

        yield Backend(open_one, expire)


Scenario = Callable[[Backend], Coroutine[None, None, None]]
Run = Callable[[Scenario], None]


@pytest.fixture(params=["embedded", "routers", "redis", "simulated redis"])
def run(request: pytest.FixtureRequest) -> Run:
    def run_it(scenario: Scenario) -> None:
        async def main() -> None:
            if request.param == "redis":
                opening = in_redis(request.getfixturevalue("redis_server"))
            elif request.param == "simulated redis":
                opening = in_simulated_redis()
            elif request.param == "kubernetes":
                opening = in_kubernetes()
            else:
                opening = embedded() if request.param == "embedded" else through_routers()
            async with opening as backend:
                await scenario(backend)

        asyncio.run(main())

    return run_it


async def seen(discovery: Discovery, own: WorkerRecord) -> Sequence[WorkerRecord]:
    """Workers that a participant knows after its next announcement, in the order of their ids."""
    await discovery.announce(own)
    return sorted(await discovery.workers(), key=lambda known: known.worker.worker_id)


@pytest.mark.parametrize("run", ["embedded", "routers", "redis", "kubernetes"], indirect=True)
def test_at_first_nobody_is_there(run: Run) -> None:
    async def scenario(backend: Backend) -> None:
        assert list(await backend.open().workers()) == []

    run(scenario)


def test_whoever_announces_is_seen_by_all_as_it_was_announced(run: Run) -> None:
    async def scenario(backend: Backend) -> None:
        first, second = backend.open(), backend.open()
        odd = WorkerRecord(WorkerAddress("w|é\n", "[::1]:1", ""), role="both", model='"', pool="{}|1")
        await first.announce(odd)
        assert await seen(second, record("p0")) == [record("p0"), odd]
        assert await seen(first, odd) == [record("p0"), odd]

    run(scenario)


def test_announcing_again_changes_nothing_and_a_new_incarnation_replaces_the_old(run: Run) -> None:
    async def scenario(backend: Backend) -> None:
        discovery = backend.open()
        for _ in range(3):
            assert await seen(discovery, record("p0")) == [record("p0")]
        assert await seen(discovery, record("p0", "2", address="10.0.0.2:1")) == [
            record("p0", "2", address="10.0.0.2:1")
        ]

    run(scenario)


def test_whoever_withdraws_is_gone_at_once_for_all(run: Run) -> None:
    async def scenario(backend: Backend) -> None:
        first, second = backend.open(), backend.open()
        await first.announce(record("p0"))
        await second.announce(record("p1"))
        await first.withdraw(record("p0"))
        await first.withdraw(record("p0"))
        assert record("p0") not in await first.workers()
        assert await seen(second, record("p1")) == [record("p1")]

    run(scenario)


def test_an_old_incarnation_cannot_withdraw_the_new_one(run: Run) -> None:
    async def scenario(backend: Backend) -> None:
        discovery = backend.open()
        await discovery.announce(record("p0", "1"))
        await discovery.announce(record("p0", "2"))
        await discovery.withdraw(record("p0", "1"))
        assert await seen(discovery, record("p1")) == [record("p0", "2"), record("p1")]

    run(scenario)


def test_of_two_incarnations_that_announce_at_once_the_later_one_counts(run: Run) -> None:
    """They took turns until the former one stopped, and readers of its blocks connected to one and the other."""

    async def scenario(backend: Backend) -> None:
        former, later, reader = (backend.open() for _ in range(3))
        old, new = record("p0", "1", epoch=7, address="10.0.0.2:1"), record("p0", "2", epoch=8)
        await former.announce(old)
        assert await seen(reader, record("p1")) == [old, record("p1")]
        for _ in range(3):
            await later.announce(new)
            await former.announce(old)
            assert await seen(reader, record("p1")) == [new, record("p1")]
        await former.withdraw(old)
        assert await seen(reader, record("p1")) == [new, record("p1")]
        await later.withdraw(new)
        await former.announce(old)
        assert await seen(reader, record("p1")) == [old, record("p1")]

    run(scenario)


def test_an_incarnation_of_the_release_before_replaces_any(run: Run) -> None:
    """It tells no epoch; a worker that was killed and rolled back is there at once."""

    async def scenario(backend: Backend) -> None:
        discovery = backend.open()
        assert await seen(discovery, record("p0", "1", epoch=7)) == [record("p0", "1", epoch=7)]
        assert await seen(discovery, record("p0", "2")) == [record("p0", "2")]

    run(scenario)


@pytest.mark.parametrize("run", ["embedded", "redis", "simulated redis"], indirect=True)
def test_an_incarnation_of_an_earlier_epoch_is_there_once_the_later_one_has_fallen_silent(run: Run) -> None:
    """As that of a machine whose clock was set back."""

    async def scenario(backend: Backend) -> None:
        discovery = backend.open()
        await discovery.announce(record("p0", "1", epoch=2**53))
        await backend.expire()
        assert await seen(discovery, record("p0", "2", epoch=7)) == [record("p0", "2", epoch=7)]

    run(scenario)


@pytest.mark.parametrize("run", ["embedded", "redis", "simulated redis"], indirect=True)
def test_whoever_falls_silent_vanishes(run: Run) -> None:
    """Routers hold what they are told in an embedded one."""

    async def scenario(backend: Backend) -> None:
        discovery = backend.open()
        await discovery.announce(record("p0"))
        await backend.expire()
        assert list(await discovery.workers()) == []
        assert await seen(discovery, record("p1")) == [record("p1")]

    run(scenario)


@pytest.mark.parametrize(
    "wrong",
    [
        record(""),
        record("p" * 513),
        record("p0", address="nowhere"),
        record("p0", address=":1"),
        record("p0", address="h:0"),
        record("p0", address="h:65536"),
        record("p0", role="cook"),
        dataclasses.replace(record("p0"), model="m" * 513),
        record("p0", epoch=2**64),
    ],
)
def test_nonsense_is_refused(run: Run, wrong: WorkerRecord) -> None:
    async def scenario(backend: Backend) -> None:
        discovery = backend.open()
        with pytest.raises(InvalidRequestError):
            await discovery.announce(wrong)
        assert list(await discovery.workers()) == []

    run(scenario)


# --- what only Kubernetes can do to us


def test_an_api_server_that_is_away_is_said_and_a_new_one_is_used() -> None:
    async def scenario() -> None:
        async with running_fake() as fake:
            terms = WatchTerms(first_backoff_s=0.02, max_backoff_s=0.1)
            discovery = KubernetesDiscovery(open_api(fake.access()), "app", terms, first_wait_s=PATIENT_S)
            labels = {"app": "tandem", "tandem.dev/role": "decode"}
            fake.put_pod("d0", ip="10.0.0.1", labels=labels)
            wanted = WorkerRecord(WorkerAddress("d0", "10.0.0.1:7900"), role="decode", model="", pool="")
            assert list(await discovery.workers()) == [wanted]
            await fake.stop()
            async with asyncio.timeout(PATIENT_S):
                with pytest.raises(LocalityUnavailableError, match="pods in namespace 'default'"):
                    await until(discovery, [])
                await discovery.announce(wanted)
                fake.put_pod("d0", ip="10.0.0.1", labels=labels, ready=False)
                await fake.start()
                while True:
                    with contextlib.suppress(LocalityUnavailableError):
                        await until(discovery, [])
                        break
                    await asyncio.sleep(0.01)
            await discovery.close()

    asyncio.run(scenario())


async def until(discovery: Discovery, wanted: Sequence[WorkerRecord]) -> None:
    while await discovery.workers() != wanted:
        await asyncio.sleep(0.01)


# --- what only Redis can do to us


def redis_scenario(server: RedisServer, scenario: Callable[[RedisDiscovery], Coroutine[None, None, None]]) -> None:
    async def main() -> None:
        with contextlib.closing(server.client()) as plain:
            plain.flushall()
        discovery = RedisDiscovery(server.url, AS_WORKER, timeout_s=0.5)
        try:
            await scenario(discovery)
        finally:
            await discovery.close()

    asyncio.run(main())


async def fails_quickly(discovery: RedisDiscovery) -> None:
    for call in (discovery.workers(), discovery.announce(record("p0")), discovery.withdraw(record("p0"))):
        started_s = time.monotonic()
        with pytest.raises(LocalityUnavailableError):
            await call
        assert time.monotonic() - started_s < PATIENT_S


def test_a_killed_redis_is_said_and_a_new_one_is_used(redis_server: RedisServer) -> None:
    async def scenario(discovery: RedisDiscovery) -> None:
        await discovery.announce(record("p0"))
        redis_server.kill()
        try:
            await fails_quickly(discovery)
        finally:
            redis_server.start()
        assert list(await discovery.workers()) == []
        assert await seen(discovery, record("p0")) == [record("p0")]

    redis_scenario(redis_server, scenario)


def test_a_paused_redis_is_given_up_and_used_again(redis_server: RedisServer) -> None:
    async def scenario(discovery: RedisDiscovery) -> None:
        await discovery.announce(record("p0"))
        with redis_server.paused():
            await fails_quickly(discovery)
        assert await seen(discovery, record("p1")) in ([record("p1")], [record("p0"), record("p1")])

    redis_scenario(redis_server, scenario)


def test_a_flushed_redis_is_filled_by_the_next_announcements(redis_server: RedisServer) -> None:
    async def scenario(discovery: RedisDiscovery) -> None:
        await discovery.announce(record("p0"))
        with contextlib.closing(redis_server.client()) as plain:
            plain.flushall()
            plain.script_flush()
        assert await seen(discovery, record("p1")) == [record("p1")]

    redis_scenario(redis_server, scenario)


def test_garbage_is_ignored_and_said_once(redis_server: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(discovery: RedisDiscovery) -> None:
        await discovery.announce(record("p0"))
        with contextlib.closing(redis_server.client()) as plain:
            entry = cast(bytes, plain.hget(KEY, "p0"))
            until, good = int(entry.split(b"|")[0]), entry.split(b"|", 1)[1]
            for number, garbage in enumerate(
                [b"", b"\xff|", b"{}", b"|", b"1|" + good, b"9999999999999999|" + good]
                + [b"%d|%s" % (until, text) for text in (b"", b"{", b"[]", b"3", b"\xff", b"[" * 100_000)]
                + [b"%d|%s" % (until, good.replace(*change)) for change in ((b"prefill", b"cook"), (b'"1"', b"1"))]
            ):
                plain.hset(KEY, f"garbage {number}", garbage)
        for _ in range(3):
            assert list(await discovery.workers()) == [record("p0")]
        with contextlib.closing(redis_server.client()) as plain:
            assert all(b"%d|" % until in value for value in plain.hvals(KEY))

    with caplog.at_level(logging.WARNING):
        redis_scenario(redis_server, scenario)
    assert len(caplog.records) == 1


@pytest.mark.parametrize("kind", ["text", "list"])
def test_a_key_of_another_kind_is_replaced(redis_server: RedisServer, kind: str) -> None:
    async def scenario(discovery: RedisDiscovery) -> None:
        with contextlib.closing(redis_server.client()) as plain:
            plain.set(KEY, "x") if kind == "text" else plain.rpush(KEY, "x")
        assert list(await discovery.workers()) == []
        assert await seen(discovery, record("p0")) == [record("p0")]

    redis_scenario(redis_server, scenario)


def test_nothing_stays_in_redis(redis_server: RedisServer) -> None:
    async def scenario(discovery: RedisDiscovery) -> None:
        await discovery.announce(record("p0"))
        with contextlib.closing(redis_server.client()) as plain:
            assert [0 < plain.pttl(key) <= 3000 for key in plain.keys("*")] == [True]

    redis_scenario(redis_server, scenario)


def test_a_wrong_url_is_refused_without_repeating_it() -> None:
    with pytest.raises(ConfigurationError) as refused:
        RedisDiscovery("http://:secret@h:1", AS_WORKER)
    assert "secret" not in str(refused.value)
