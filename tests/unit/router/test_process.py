"""A whole router: over gRPC with workers that announce themselves, over HTTP for operators, and as a process."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path

import pytest

from tandem.core.chain_hasher import ChainHasher
from tandem.core.errors import ConfigurationError, TandemError, UnavailableError
from tandem.core.scope import UNSCOPED
from tandem.locality.redis import RedisIndex
from tandem.process.discovery import Discovery
from tandem.process.discovery_choice import open_discovery
from tandem.process.fleet_view import Chain
from tandem.router import process as router_process
from tandem.router.process import serving_router
from tandem.routing.admission import AdmissionLimits
from tandem.routing.fleet import Fleet
from tandem.routing.snapshot import Links, Role
from tandem.routing.speed import Speed
from tandem.rpc.client import RouterClient
from tandem.rpc.credentials import Credentials, ProcessRole
from tandem.rpc.messages import PairCall, PairingAnswer, WorkerStatus
from tests.helpers import command_line
from tests.helpers.redis_server import running_redis
from tests.helpers.secret import AS_GATEWAY, AS_WORKER, SECRET
from tests.unit.process.stub_workers import PATIENT_S, StubWorker, record, router_settings, serving_worker, status

ROOT = Path(__file__).parents[3]
CALL = PairCall(request_id="r", model="m", token_ids=tuple(range(64)), num_expected_output=10, scope=UNSCOPED)
BIND = "127.0.0.1:0"


def run(scenario: Coroutine[None, None, None]) -> None:
    asyncio.run(scenario)


@contextlib.asynccontextmanager
async def announcing(status: WorkerStatus, discovery: Discovery, secret: bytes = SECRET) -> AsyncIterator[StubWorker]:
    """A worker that serves and announces itself as it should, until the end of the block."""
    stub = StubWorker(status)

    async def announce(address: str) -> None:
        while True:
            with contextlib.suppress(TandemError):
                await discovery.announce(record(status.worker.worker_id, address=address))
            await asyncio.sleep(0.1)

    async with serving_worker(stub, secret=secret) as server:
        task = asyncio.create_task(announce(server.address))
        yield stub
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def paired(client: RouterClient) -> PairingAnswer:
    """The answer once there is one."""
    async with asyncio.timeout(PATIENT_S):
        while True:
            with contextlib.suppress(UnavailableError):
                return await client.pair(CALL)
            await asyncio.sleep(0.01)


async def refused(client: RouterClient) -> float:
    """Seconds until the router finds nobody any more."""
    started_s = time.monotonic()
    async with asyncio.timeout(PATIENT_S):
        with contextlib.suppress(UnavailableError):
            while True:
                await client.pair(CALL)
                await asyncio.sleep(0.01)
    return time.monotonic() - started_s


def get(port: int, path: str) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=PATIENT_S) as answer:
        return str(answer.read().decode())


def test_workers_register_and_are_paired_and_the_dead_are_not() -> None:
    async def scenario() -> None:
        secret = "sixteen letters!"
        settings = router_settings(cluster_secret=secret, metrics_port=0)
        async with serving_router(settings) as router, contextlib.AsyncExitStack() as opened:
            client = RouterClient(router.address, Credentials(secret.encode(), ProcessRole.GATEWAY))
            opened.push_async_callback(client.close)
            discovery = open_discovery(None, [router.address], Credentials(secret.encode(), ProcessRole.DECODE))
            opened.push_async_callback(discovery.close)
            async with announcing(status("d0", Role.DECODE), discovery, secret.encode()) as stub:
                answer = await paired(client)
                assert (answer.decode.worker_id, answer.prefill) == ("d0", None)
                assert [model.name for model in await client.models()] == ["m"]
                assert [listing.is_alive for listing in await client.workers()] == [True]
                stub.hush()
                assert 1.0 < await refused(client) < 10
                stub.hush(False)
                assert await paired(client)
            assert await refused(client) < 1.5
            assert [listing.is_alive for listing in await client.workers()] == [False]
            assert router.metrics_port is not None
            page = await asyncio.to_thread(get, router.metrics_port, "/metrics")
            assert 'tandem_router_decisions_total{outcome="paired",policy="predicted cost"}' in page
            assert "tandem_index_blocks 0.0" in page
            assert '"status": "ok"' in await asyncio.to_thread(get, router.metrics_port, "/health")

    run(scenario())


def test_no_two_routers_break_ties_in_the_same_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """All drew the first turns of workers from one seed, so replicas sent their first requests to the same ones."""
    seeds: list[int | str] = []

    def noting(limits: AdmissionLimits, links: Links, speed_of: Callable[[str], Speed], seed: int | str = 0) -> Fleet:
        seeds.append(seed)
        return Fleet(limits, links, speed_of, seed)

    async def scenario() -> None:
        async with serving_router(router_settings()), serving_router(router_settings()):
            pass

    monkeypatch.setattr(router_process, "Fleet", noting)
    run(scenario())
    assert len(set(seeds)) == 2


def test_named_workers_need_not_announce_themselves() -> None:
    async def scenario() -> None:
        async with serving_worker(StubWorker(status("d0", Role.DECODE))) as server:
            settings = router_settings(workers=f" {server.address},127.0.0.1:1")
            async with serving_router(settings) as router:
                client = RouterClient(router.address, AS_GATEWAY)
                assert (await paired(client)).decode.address == server.address
                await client.close()

    run(scenario())


def test_redis_dies_and_serving_goes_on_and_locality_comes_back() -> None:
    async def scenario() -> None:
        with running_redis() as redis:
            async with serving_router(router_settings(redis=redis.url)) as router:
                client = RouterClient(router.address, AS_GATEWAY)
                discovery = open_discovery(redis.url, [], AS_WORKER)
                async with announcing(status("d0", Role.DECODE), discovery):
                    assert (await paired(client)).decode_cached_blocks == 0
                    hold_prompt(redis.url)
                    async with asyncio.timeout(PATIENT_S):
                        while (await client.pair(CALL)).decode_cached_blocks != 3:
                            await asyncio.sleep(0.02)
                    redis.kill()
                    assert (await client.pair(CALL)).decode_cached_blocks == 0
                    await asyncio.to_thread(redis.start)
                    hold_prompt(redis.url)
                    async with asyncio.timeout(PATIENT_S):
                        while (await client.pair(CALL)).decode_cached_blocks != 3:
                            await asyncio.sleep(0.02)
                await discovery.close()
                await client.close()

    run(scenario())


def hold_prompt(url: str) -> None:
    """Tell the index that the decode worker holds the prompt's blocks."""
    with contextlib.closing(RedisIndex(url)) as index:
        index.replace(
            "d0", 1, ChainHasher().hashes(Chain("weights", 16, frozenset()).root(UNSCOPED), CALL.token_ids, 16), 0
        )


def test_when_a_router_has_ended_nothing_of_it_is_left() -> None:
    async def scenario() -> None:
        address = "127.0.0.1:0"
        for _ in range(2):
            async with serving_router(router_settings(bind=address)) as router:
                address = router.address
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(scenario())


def test_an_address_that_is_taken_is_refused_and_nothing_stays_open() -> None:
    async def scenario() -> None:
        async with serving_router(router_settings()) as router:
            with pytest.raises(ConfigurationError):
                async with serving_router(router_settings(bind=router.address)):
                    raise AssertionError("two routers at one address")

    run(scenario())


def test_the_process_says_when_it_is_ready_and_ends_cleanly() -> None:
    command = [sys.executable, "-m", "services.router", "--bind", BIND]
    env = {**os.environ, "PYTHONUNBUFFERED": "1", "TANDEM_CLUSTER_SECRET": SECRET.decode()}
    for number in (signal.SIGTERM, signal.SIGINT):
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=env) as process:
            assert process.stderr is not None
            assert "router ready at 127.0.0.1:" in process.stderr.readline()
            process.send_signal(number)
            assert process.wait(PATIENT_S) == 0
            assert "Traceback" not in process.stderr.read()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--bind", "nonsense"], "--bind='nonsense': write host:port"),
        (["--policy", "magic"], "--policy='magic': use one of predicted-cost"),
        (["--workers", "a:1,b"], "'b' is not host:port"),
        (["--redis", "http://x"], "Redis URL 'http://x' is not understood"),
        (["--cluster-secret", ""], "cluster_secret has 0 bytes"),
        (["--log-level", "loud"], "--log-level='loud': Input should be 'debug', "),
        (["--wrong", "1"], "--wrong"),
    ],
)
def test_settings_that_cannot_be_honoured_are_one_line(arguments: list[str], said: str) -> None:
    env = command_line.environment(TANDEM_CLUSTER_SECRET=SECRET.decode())
    result = command_line.run("--bind", BIND, *arguments, module="services.router", env=env, timeout_s=60)
    assert result.returncode == 2
    assert said in result.stderr
    assert "Traceback" not in result.stderr


def test_the_news_of_a_large_fleet_do_not_set_off_the_collector() -> None:
    """Each worker's status replaces the last one; what nobody replaces is looked through in time."""
    code = """
import gc
from tandem.router.process import relax_garbage_collector
from tests.unit.process.stub_workers import status

relax_garbage_collector()
begun = []
gc.callbacks.append(lambda phase, _: begun.append(phase))
known = {}
for _ in range(3):
    known |= {number: status(f"w{number}") for number in range(1024)}
assert not begun, begun
kept = [[] for _ in range(30_000)]
assert begun
"""
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_no_torch_comes_with_a_router() -> None:
    code = "import sys, tandem.router.process, tandem.process.command; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
