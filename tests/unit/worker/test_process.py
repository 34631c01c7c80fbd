"""A worker's life: what it tells others while it lives, and a clean end."""

import asyncio
import contextlib
import os
import random
import signal
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tandem.core.clock import Clock, ManualClock
from tandem.core.errors import (
    CapacityError,
    ConfigurationError,
    InvalidRequestError,
    LocalityUnavailableError,
    UnavailableError,
    WorkerLostError,
)
from tandem.core.hashing import extend_hashes, root_hash
from tandem.core.scope import UNSCOPED
from tandem.engine.engine import Engine
from tandem.gateway.errors import problem_of
from tandem.locality.redis import RedisIndex
from tandem.process.ports import free_ports
from tandem.router.process import serving_router
from tandem.router.settings import RouterSettings
from tandem.rpc.client import RouterClient, WorkerClient
from tandem.rpc.messages import GenerateCall, PairCall, WorkerAddress, WorkerRecord, WorkerStatus
from tandem.worker.process import EXIT_STUCK, WorkerProcess, _announce, serving_worker
from tandem.worker.settings import DecodeSettings
from tandem.worker.sources import Sources
from tandem.worker.stopwatch import draft_attributes
from tests.helpers.callers import WorkerCaller
from tests.helpers.redis_server import running_redis
from tests.helpers.secret import AS_GATEWAY, SECRET
from tests.helpers.workers import GREEDY, LONG, at_rest, generated, is_at_rest, pair_of, prompt_of, settings_of, until

ROOT = Path(__file__).parents[3]
PROMPT = prompt_of(60)
CALL = GenerateCall(request_id="g", prompt_token_ids=PROMPT, params=GREEDY, scope=UNSCOPED)


@contextlib.asynccontextmanager
async def one_worker(
    path: Path, clock: Clock | None = None, **settings: object
) -> AsyncIterator[tuple[WorkerProcess, WorkerClient]]:
    settings = {"transport": "tcp", **settings}
    async with serving_worker(settings_of(DecodeSettings, path, "d0", **settings), clock=clock) as worker:
        client = WorkerCaller(worker.core.me.address)
        try:
            yield worker, client
        finally:
            await client.close()


def hashes_of(worker: WorkerProcess) -> list[bytes]:
    hashes: list[bytes] = []
    root = root_hash(UNSCOPED, model_fingerprint=worker.reports.model.fingerprint, block_size=8)
    extend_hashes(root, hashes, PROMPT, 8)
    return hashes


# --- reports ----------------------------------------------------------------------------------------------------------


def test_news_are_of_the_engine_as_it_was_between_two_steps(llama: Path) -> None:
    async def main() -> None:
        async with one_worker(llama) as (worker, client):
            engine = worker.core.engine
            total = (await client.status()).state.num_total_blocks
            await engine.call(lambda e: e.kv.borrow("taken", total - 2))
            waiting = asyncio.create_task(generated(client, CALL))
            await until(lambda: has_waiting(worker), "a waiting request")
            await worker.reports.refresh()
            status = await client.status()
            assert status.blocks == {
                "free": 2,
                "cached": 0,
                "used": 0,
                "leased": 0,
                "transferring": total - 2,
                "pinned": 0,
            }
            assert (status.num_waiting, status.state.num_running, status.state.num_context_tokens) == (1, 1, 60)
            assert (status.state.queued.num_requests, status.state.queued.num_tokens) == (1, 60)
            assert status.state.queued.num_pairs == 60 * 30
            assert status.state.num_free_blocks == 2
            await engine.call(lambda e: e.kv.drop("taken"))
            await waiting
            await worker.reports.refresh()
            status = await client.status()
            assert (status.state.num_running, status.state.queued.num_tokens) == (0, 0)
            assert status.blocks["cached"] == 8
            assert status.state.num_free_blocks == total

    asyncio.run(main())


def test_status_counts_drafts_and_a_request_has_its_own(llama: Path) -> None:
    async def main() -> None:
        async with one_worker(llama, speculate="ngram", draft_always=True) as (worker, client):
            call = replace(CALL, params=replace(GREEDY, max_tokens=100, ignore_eos=True))  # it repeats itself
            updates = [update async for update in client.generate(call)]
            metrics = updates[-1].output.metrics
            (decode,) = [stage for stage in updates[-1].timeline if stage.name == "decode"]
            await worker.reports.refresh()
            drafts = (await client.status()).drafts
        assert drafts is not None
        assert metrics is not None
        assert metrics.drafts is not None
        assert replace(metrics.drafts, saved_s=drafts.saved_s) == drafts
        assert drafts.num_steps + drafts.num_accepted == metrics.num_output_tokens - 1
        assert drafts.num_drafted > 0
        assert drafts.saved_s is not None
        assert draft_attributes(metrics.drafts).items() <= decode.attributes.items()
        assert drafts.saved_s < 0  # no step ran without drafts, so what theirs brought is not known

    asyncio.run(main())


def test_a_drafter_that_the_worker_does_not_have_is_refused_by_name(llama: Path) -> None:
    async def main() -> None:
        async with one_worker(llama, speculate="ngram") as (_, client):
            call = replace(CALL, params=replace(GREEDY, speculate="suffix"))
            with pytest.raises(InvalidRequestError, match=r"speculate='suffix'.*use off or auto or ngram") as refused:
                await generated(client, call)
            assert problem_of(refused.value).param == "speculate"
            assert len(await generated(client, replace(call, params=replace(GREEDY, speculate="off")))) > 0
            assert len(await generated(client, replace(call, output_token_ids=(7,)))) > 0

    asyncio.run(main())


def test_news_tell_what_the_process_uses(llama: Path) -> None:
    async def main() -> None:
        async with one_worker(llama) as (_, client):

            async def has_cpu() -> bool:
                usage = (await client.status()).usage
                return usage is not None and usage.cpu_cores is not None

            await until(has_cpu, "the first second's CPU")
            usage = (await client.status()).usage
            assert usage is not None
            assert usage.memory_bytes == pytest.approx(psutil.Process().memory_info().rss, rel=0.3)

    asyncio.run(main())


async def has_waiting(worker: WorkerProcess) -> bool:
    return await worker.core.engine.call(lambda engine: engine.num_waiting) == 1


def test_what_is_promised_is_not_free(llama: Path) -> None:
    async def main() -> None:
        async with one_worker(llama, max_num_batched_tokens=8, max_num_running=8) as (worker, _):
            stream = worker.core.engine.stream(PROMPT, LONG)
            seen: list[tuple[int, int]] = []

            def look(engine: Engine) -> None:
                load = engine.load()
                seen.append((load.num_unpromised_blocks, load.usage.free))

            task = asyncio.ensure_future(anext(stream))
            while not task.done():
                await worker.core.engine.call(look)
            await stream.aclose()
            await at_rest(worker)
            assert any(unpromised < free for unpromised, free in seen), "promises were not taken off"

    asyncio.run(main())


def test_status_is_told_while_the_engine_is_in_a_long_step(llama: Path) -> None:
    async def main() -> None:
        async with one_worker(llama) as (worker, client):
            over = threading.Event()

            def long_step(_: Engine) -> None:
                over.wait(60)

            worker.core.engine.post(long_step)
            try:
                async with asyncio.timeout(20):
                    for _ in range(5):
                        assert (await client.status(timeout_s=20)).lifecycle == "ready"
                    assert await client.renew(["x"], timeout_s=20)
                    status = client.watch(0.01)
                    for _ in range(3):
                        await anext(status)
                    await status.aclose()
            finally:
                over.set()

    asyncio.run(main())


def test_figures_age_while_the_engine_is_in_a_step(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.worker.process.REPORT_INTERVAL_S", 3600.0)  # nobody else asks

    async def main() -> None:
        clock = ManualClock(100.0)
        async with one_worker(llama, clock) as (worker, client):
            begun, over = threading.Event(), threading.Event()

            def long_step(_: Engine) -> None:
                begun.set()
                over.wait(60)

            worker.core.engine.post(long_step)
            try:
                await asyncio.to_thread(begun.wait, 5)
                asking = asyncio.create_task(worker.reports.refresh())
                await asyncio.sleep(0)
                for age_s in (0.0, 0.5, 1.0):
                    assert (await client.status()).state.figures_age_s == age_s
                    clock.advance(0.5)
            finally:
                over.set()
            await asking
            state = (await client.status()).state
            assert state.figures_age_s == 1.5, "what came during the step is not in them"
            assert state.taken_age_s == 0
            clock.advance(0.5)
            assert (await client.status()).state.taken_age_s == 0.5
            await worker.reports.refresh()
            assert (await client.status()).state.figures_age_s == 0

    asyncio.run(main())


def test_each_watcher_is_told_every_sample_once(llama: Path) -> None:
    async def main() -> None:
        async with one_worker(llama) as (worker, client):
            first, second = worker.reports.subscribe(), worker.reports.subscribe()
            await generated(client, CALL)
            await worker.reports.refresh()
            told: list[WorkerStatus] = [first.latest(), second.latest()]
            assert told[0].prefill_samples == told[1].prefill_samples
            assert sum(sample.work.num_tokens for sample in told[0].prefill_samples) == 60
            assert [sample.num_context_tokens for sample in told[0].step_samples] == list(range(61, 70))
            assert not first.latest().prefill_samples
            worker.reports.unsubscribe(first)
            assert not worker.reports.latest().step_samples

    asyncio.run(main())


# --- feeds ------------------------------------------------------------------------------------------------------------


def test_blocks_are_reported_to_redis(llama: Path) -> None:
    async def main() -> None:
        with running_redis() as server:
            async with one_worker(llama, redis=server.url) as (worker, client):
                await generated(client, CALL)
                index = RedisIndex(server.url, read_timeout_s=5.0)

                async def is_known() -> bool:
                    return dict(await asyncio.to_thread(index.leading_blocks, hashes_of(worker))) == {"d0": 7}

                await until(is_known, "the prompt's blocks in Redis")
                server.client().flushall()
                await until(is_known, "the blocks again after Redis lost everything")
                index.close()

    asyncio.run(main())


def test_blocks_are_reported_to_a_router_and_again_when_it_comes_back(llama: Path) -> None:
    async def main() -> None:
        port = free_ports(1, "127.0.0.1", random.Random())[0]
        bind = f"127.0.0.1:{port}"
        async with one_worker(llama, routers=bind, served_model_name="m") as (worker, client):
            await generated(client, CALL)
            for when in ("first", "back"):
                told = {"bind": bind, "cluster_secret": SECRET.decode()}
                async with serving_router(RouterSettings.model_validate(told)):
                    router = RouterClient(bind, AS_GATEWAY)
                    await until(lambda r=router: knows(r), f"the blocks at the router ({when})", 10)  # type: ignore[misc]
                    await router.close()
            assert await is_at_rest(worker)

    asyncio.run(main())


async def knows(router: RouterClient) -> bool:
    call = PairCall(
        request_id="p", model="m", token_ids=PROMPT, num_expected_output=5, local_prefill=True, scope=UNSCOPED
    )
    try:
        return (await router.pair(call)).decode_cached_blocks == 7
    except (UnavailableError, WorkerLostError):
        return False


# --- cores ------------------------------------------------------------------------------------------------------------


def test_a_worker_whose_core_board_was_deleted_serves_without(
    llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with one_worker(llama, core_board=f"{tmp_path / 'deleted'}:0") as (_, client):
            assert await generated(client, CALL)

    asyncio.run(main())
    [warning] = [record.message for record in caplog.records if "cores" in record.message]
    assert warning.startswith(f"no cores are borrowed: core_board='{tmp_path / 'deleted'}' is not there")


def test_a_core_board_that_is_none_ends_the_start(llama: Path, tmp_path: Path) -> None:
    async def main() -> None:
        (tmp_path / "board").write_bytes(b"short")
        with pytest.raises(ConfigurationError, match="no slot 0"):
            async with one_worker(llama, core_board=f"{tmp_path / 'board'}:0"):
                raise AssertionError("a board without slots")

    asyncio.run(main())


# --- the end ----------------------------------------------------------------------------------------------------------


def test_draining_waits_for_what_runs(llama: Path) -> None:
    async def main() -> None:
        async with pair_of(llama) as pair:
            stream = pair.to_decode.generate(
                GenerateCall(
                    request_id="r", prompt_token_ids=PROMPT, params=LONG, prefill=pair.prefill.core.me, scope=UNSCOPED
                )
            )
            tokens = list((await anext(stream)).output.token_ids)
            draining = asyncio.create_task(pair.decode.drain(10))
            tokens += [t async for status in stream for t in status.output.token_ids]
            assert len(tokens) == LONG.max_tokens
            assert await draining
            await at_rest(pair.prefill, pair.decode)

    asyncio.run(main())


def test_draining_gives_up_when_its_grace_is_over(llama: Path) -> None:
    async def main() -> None:
        async with one_worker(llama) as (worker, _):
            assert await worker.drain(0), "idle, yet not drained"
            with worker.lifecycle.working():
                assert not await worker.drain(0.05)

    asyncio.run(main())


def test_nothing_is_left_open_when_starting_fails(llama: Path) -> None:
    """Warnings are errors: a socket or coroutine that is left over fails this."""

    async def main() -> None:
        async with one_worker(llama) as (worker, _):
            with pytest.raises(ConfigurationError, match="cannot listen"):
                async with one_worker(llama, bind=worker.core.me.address):
                    raise AssertionError("two workers at one address")

    asyncio.run(main())


@pytest.mark.parametrize("role", ["decode", "prefill"])
def test_sigterm_lets_a_request_finish_and_exits_cleanly(llama: Path, role: str) -> None:
    async def main() -> None:
        port = free_ports(1, "127.0.0.1", random.Random())[0]
        command = [sys.executable, "-m", f"services.{role}", "--model", str(llama), "--bind", f"127.0.0.1:{port}"]
        command += ["--device", "cpu", "--kv-cache-gib", "0.002", "--num-threads", "1", "--transport", "tcp"]
        environment = {k: v for k, v in os.environ.items() if not k.startswith("TANDEM_")}
        environment |= {"PYTHONPATH": str(ROOT), "TANDEM_CLUSTER_SECRET": SECRET.decode()}
        process = await asyncio.create_subprocess_exec(
            *command, cwd=ROOT, env=environment, stderr=asyncio.subprocess.PIPE
        )
        client = WorkerCaller(f"127.0.0.1:{port}")
        try:
            await until(lambda: answers(client), "the process", 60)
            stream = client.generate(GenerateCall(request_id="r", prompt_token_ids=PROMPT, params=LONG, scope=UNSCOPED))
            tokens = list((await anext(stream)).output.token_ids)
            process.send_signal(signal.SIGTERM)
            tokens += [t async for status in stream for t in status.output.token_ids]
            assert len(tokens) == LONG.max_tokens
            _, log = await asyncio.wait_for(process.communicate(), 15)
            assert process.returncode == 0, log.decode()
            assert b"Traceback" not in log, log.decode()
            assert b"drains" in log
        finally:
            await client.close()
            if process.returncode is None:
                process.kill()
                await process.communicate()

    asyncio.run(main())


def test_sigterm_while_the_model_loads_ends_the_process_at_once(tmp_path: Path) -> None:
    """As the first process of a container: there a signal that nobody handles is lost."""
    os.mkfifo(tmp_path / "config.json")  # NOTE: reading it waits for a writer that never comes

    def is_read() -> bool:
        """Opening to write succeeds once somebody waits to read."""
        with contextlib.suppress(OSError):
            held.append(os.open(tmp_path / "config.json", os.O_WRONLY | os.O_NONBLOCK))
        return bool(held)

    async def main() -> None:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "services.decode", "--model", str(tmp_path)),
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "TANDEM_CLUSTER_SECRET": SECRET.decode()},
        )
        try:
            async with asyncio.timeout(60):
                while not is_read():
                    await asyncio.sleep(0.05)
            process.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(process.wait(), 10) == 0
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    held: list[int] = []
    try:
        asyncio.run(main())
    finally:
        for descriptor in held:
            os.close(descriptor)


HANGING = """
import asyncio, sys, time
from pathlib import Path
from tandem.worker.process import serving_worker
from tandem.worker.settings import DecodeSettings
from tests.helpers.workers import settings_of

async def main():
    settings = settings_of(DecodeSettings, Path(sys.argv[1]), "d0", transport="tcp", max_step_s=0.5)
    async with serving_worker(settings) as worker:
        worker.core.engine.post(lambda engine: time.sleep(600))
        await asyncio.sleep(600)

asyncio.run(main())
"""


def test_an_engine_that_hangs_ends_its_process(llama: Path) -> None:
    """Its event loop would go on answering, and nobody would take over."""

    async def main() -> None:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", HANGING, str(llama)),
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            _, log = await asyncio.wait_for(process.communicate(), 60)
        finally:
            if process.returncode is None:
                process.kill()
                await process.communicate()
        assert process.returncode == EXIT_STUCK, log.decode()
        assert b"busy with one step" in log

    asyncio.run(main())


async def answers(client: WorkerClient) -> bool:
    try:
        return (await client.status()).lifecycle == "ready"
    except WorkerLostError:
        return False


class AwayDiscovery:
    """Cannot be reached. `tried` is set when that was found out a third time."""

    def __init__(self) -> None:
        self.num_tries = 0
        self.tried = asyncio.Event()

    async def announce(self, record: WorkerRecord) -> None:
        self.num_tries += 1
        if self.num_tries == 3:
            self.tried.set()
        raise LocalityUnavailableError("Redis is away")

    async def withdraw(self, record: WorkerRecord) -> None: ...

    async def workers(self) -> Sequence[WorkerRecord]:
        return []

    async def close(self) -> None: ...


class SlowSources(Sources):
    """Meets somebody who is silent, until `go`."""

    num_meetings = 0

    def __init__(self, worker: WorkerProcess) -> None:
        super().__init__(worker.core)
        self.go = asyncio.Event()

    async def meet(self, workers: Sequence[WorkerAddress]) -> None:
        self.num_meetings += 1
        await self.go.wait()


class NearDiscovery(AwayDiscovery):
    """Is told at once; `tried` as above."""

    async def announce(self, record: WorkerRecord) -> None:
        with contextlib.suppress(LocalityUnavailableError):
            await super().announce(record)


class ListDiscovery(NearDiscovery):
    """Keeps whom it was told of. Its answer to `withdraw` takes a while."""

    def __init__(self) -> None:
        super().__init__()
        self.listed: set[WorkerRecord] = set()

    async def announce(self, record: WorkerRecord) -> None:
        await super().announce(record)
        self.listed.add(record)

    async def withdraw(self, record: WorkerRecord) -> None:
        self.listed.discard(record)
        for _ in range(100):
            await asyncio.sleep(0)


def test_a_worker_that_has_withdrawn_is_not_announced_again(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was, until it had the answer of every router, and then stayed listed for seconds after its end."""
    discovery = ListDiscovery()
    monkeypatch.setattr("tandem.worker.process.ANNOUNCE_INTERVAL_S", 0.0)
    monkeypatch.setattr("tandem.worker.process._open_discovery", lambda *_: discovery)

    async def main() -> None:
        async with one_worker(llama):
            await asyncio.wait_for(discovery.tried.wait(), 20)
            assert len(discovery.listed) == 1

    asyncio.run(main())
    assert not discovery.listed


class LargeDiscovery(NearDiscovery):
    """Lists a thousand workers. Each announcement takes a second."""

    def __init__(self, clock: ManualClock) -> None:
        super().__init__()
        self.clock, self.over = clock, asyncio.Event()
        self.num_announced = self.num_looks = 0

    async def announce(self, record: WorkerRecord) -> None:
        self.num_announced += 1
        self.clock.advance(1.0)
        if self.num_announced == 600:
            self.over.set()

    async def workers(self) -> Sequence[WorkerRecord]:
        self.num_looks += 1
        return [WorkerRecord(WorkerAddress(f"w{n}", f"127.0.0.1:{n}", ""), "decode", "m", "other") for n in range(1000)]


def test_in_a_large_fleet_a_worker_looks_seldom_who_is_there(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1000 workers look every 50 to 150 s, and announce themselves every second all the same."""
    monkeypatch.setattr("tandem.worker.process.ANNOUNCE_INTERVAL_S", 0.0)

    async def main() -> None:
        async with one_worker(llama) as (worker, _):
            clock = ManualClock(0.0)
            discovery = LargeDiscovery(clock)
            record = WorkerRecord(worker.core.me, "decode", "m", "pool")
            announcing = asyncio.create_task(_announce(discovery, record, Sources(worker.core), clock))
            await asyncio.wait_for(discovery.over.wait(), 20)
            announcing.cancel()
            await asyncio.gather(announcing, return_exceptions=True)
            assert 4 <= discovery.num_looks <= 13

    asyncio.run(main())


def test_a_worker_announces_itself_while_a_peer_is_silent(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.worker.process.ANNOUNCE_INTERVAL_S", 0.01)

    async def main() -> None:
        async with one_worker(llama) as (worker, _):
            discovery, sources = NearDiscovery(), SlowSources(worker)
            record = WorkerRecord(worker.core.me, "decode", "m", "pool")
            announcing = asyncio.create_task(_announce(discovery, record, sources, worker.core.clock))
            await asyncio.wait_for(discovery.tried.wait(), 20)
            assert sources.num_meetings == 1
            sources.go.set()
            await until(lambda: has_met(sources, 2), "the next meeting")
            announcing.cancel()
            await asyncio.gather(announcing, return_exceptions=True)

    asyncio.run(main())


async def has_met(sources: SlowSources, number: int) -> bool:
    return sources.num_meetings >= number


def test_kv_crosses_between_workers_of_ipv6_addresses(llama: Path) -> None:
    try:
        (port,) = free_ports(1, "::1", random.Random())
    except CapacityError:
        pytest.skip("this machine has no IPv6 loopback address")

    async def main() -> None:
        address = f"[::1]:{port}"
        async with pair_of(llama, transport="tcp", prefill={"bind": address, "advertise": address}) as pair:
            call = replace(CALL, prefill=pair.prefill.core.me)
            await generated(pair.to_decode, call)
            counters = await pair.decode.core.engine.call(lambda engine: engine.counters)
            assert counters.num_fetched_tokens == len(PROMPT)

    asyncio.run(main())


def test_what_stands_in_the_way_of_announcing_is_said_once(llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with one_worker(llama) as (worker, _):
            discovery, me = AwayDiscovery(), worker.core.me
            announcing = asyncio.create_task(
                _announce(discovery, WorkerRecord(me, "decode", "m", "pool"), Sources(worker.core), worker.core.clock)
            )
            await asyncio.wait_for(discovery.tried.wait(), 20)
            announcing.cancel()
            await asyncio.gather(announcing, return_exceptions=True)

    asyncio.run(main())
    assert [record.message for record in caplog.records if "not announced" in record.message] == [
        "not announced: Redis is away"
    ]
