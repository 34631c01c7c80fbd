"""Redis in hostile hands: no record of theirs is believed, and nothing is sent to them."""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import replace
from typing import cast

import httpx
import pytest

from tandem.core.errors import InvalidRequestError, UnavailableError
from tandem.core.scope import UNSCOPED
from tandem.process.discovery_redis import RedisDiscovery
from tandem.process.seals import RecordSealer
from tandem.router.process import RouterProcess, serving_router
from tandem.routing.snapshot import Role
from tandem.rpc import methods
from tandem.rpc.client import RouterClient
from tandem.rpc.messages import PairCall, WorkerRecord
from tests.helpers.impostor import impostor
from tests.helpers.redis_server import RedisServer, running_redis
from tests.helpers.secret import AS_GATEWAY, AS_ROUTER, AS_WORKER
from tests.unit.process.stub_workers import (
    PATIENT_S,
    StubWorker,
    eventually,
    record,
    router_settings,
    serving_worker,
    status,
)

KEY = "{tandem}:workers"
CALL = PairCall(request_id="r", model="m", token_ids=tuple(range(64)), num_expected_output=10, scope=UNSCOPED)


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


def write(redis: RedisServer, name: str, entry: bytes) -> None:
    with contextlib.closing(redis.client()) as plain:
        plain.hset(KEY, name, entry)


def read(redis: RedisServer, name: str) -> bytes:
    with contextlib.closing(redis.client()) as plain:
        return cast(bytes, plain.hget(KEY, name))


def end_of(entry: bytes) -> int:
    return int(entry.partition(b"|")[0])


def forged(redis: RedisServer, told: WorkerRecord) -> bytes:
    """A record as anybody can write it who has read the source code, with a seal of another secret."""
    with contextlib.closing(redis.client()) as plain:
        seconds, _ = plain.time()
    own = {"role": told.role, "model": told.model, "pool": told.pool}
    worker = told.worker
    fields = {"worker_id": worker.worker_id, "address": worker.address, "incarnation": worker.incarnation}
    sealer = RecordSealer(replace(AS_WORKER, secret=b"not the secret of the cluster"), "worker")
    return sealer.seal(worker.worker_id.encode(), seconds * 1000 + 2500, json.dumps(fields | own).encode())


def looking(redis: RedisServer, scenario: Callable[[RedisDiscovery], Coroutine[None, None, None]]) -> None:
    async def main() -> None:
        with contextlib.closing(redis.client()) as plain:
            plain.flushall()
        discovery = RedisDiscovery(redis.url, AS_WORKER, timeout_s=PATIENT_S)
        try:
            await scenario(discovery)
        finally:
            await discovery.close()

    asyncio.run(main())


def test_only_what_the_cluster_sealed_is_believed(redis: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(discovery: RedisDiscovery) -> None:
        refused: list[None] = []
        router = RedisDiscovery(redis.url, AS_ROUTER, timeout_s=PATIENT_S, on_refused=lambda: refused.append(None))
        await discovery.announce(record("p0"))
        entry = read(redis, "p0")
        until, seal, content = entry.split(b"|", 2)
        attempts = {
            "another name": entry,
            "p0": b"%d|%s|%s" % (int(until) + 1, seal, content),
            "p1": b"%s|%s|%s" % (until, seal, content.replace(b'"p0"', b'"p1"')),
            "p2": b"%s|%s|%s" % (until, seal, content.replace(b"10.0.0.1", b"10.0.0.2")),
            "p3": b"%s|%s" % (until, content),
            "p4": b"%s||%s" % (until, content),
            "p5": forged(redis, record("p5")),
        }
        for name, attempt in attempts.items():
            write(redis, name, attempt)
        assert list(await router.workers()) == []
        assert len(refused) == len(attempts)
        await discovery.announce(record("p0"))
        assert list(await router.workers()) == [record("p0")]
        assert len(refused) == 2 * len(attempts) - 1
        await router.close()

    with caplog.at_level(logging.WARNING):
        looking(redis, scenario)
    assert ["not sealed with this cluster's secret" in each.message for each in caplog.records] == [True]


def test_a_record_that_was_kept_and_is_written_again_has_ended(redis: RedisServer) -> None:
    async def scenario(discovery: RedisDiscovery) -> None:
        short = RedisDiscovery(redis.url, AS_WORKER, ttl_s=0.05, timeout_s=PATIENT_S)
        await short.announce(record("p0"))
        kept = read(redis, "p0")
        async with asyncio.timeout(PATIENT_S):
            while await short.workers():
                await asyncio.sleep(0.01)
        write(redis, "p0", kept)
        assert list(await discovery.workers()) == []
        await short.close()

    looking(redis, scenario)


def test_a_seal_is_of_one_kind_key_end_and_content() -> None:
    sealer = RecordSealer(AS_WORKER, "worker")
    sealed = sealer.seal(b"p0", 5, b"content|with|bars")
    assert sealer.opened(b"p0", sealed) == b"content|with|bars"
    assert RecordSealer(replace(AS_ROUTER, incarnation="other"), "worker").opened(b"p0", sealed) == b"content|with|bars"
    for other, key, entry in (
        (RecordSealer(AS_WORKER, "router"), b"p0", sealed),
        (sealer, b"p1", sealed),
        (sealer, b"p0", b"6" + sealed[1:]),
        (sealer, b"p0", b"05" + sealed[1:].replace(b"content", b"Content")),
        (sealer, b"p0", sealed + b"."),
        (sealer, b"p0", b""),
        (sealer, b"p0", b"||"),
    ):
        with pytest.raises(InvalidRequestError, match="not sealed"):
            other.opened(key, entry)


@contextlib.asynccontextmanager
async def router_of(redis: RedisServer) -> AsyncIterator[tuple[RouterProcess, RouterClient]]:
    with contextlib.closing(redis.client()) as plain:
        plain.flushall()
    async with serving_router(router_settings(redis=redis.url, metrics_port=0)) as router:
        client = RouterClient(router.address, AS_GATEWAY)
        try:
            yield router, client
        finally:
            await client.close()


async def num_refused(router: RouterProcess) -> float:
    async with httpx.AsyncClient(trust_env=False) as http:
        text = (await http.get(f"http://127.0.0.1:{router.metrics_port}/metrics")).text
    (line,) = (line for line in text.splitlines() if line.startswith("tandem_router_records_refused_total "))
    return float(line.split()[1])


def echo(data: bytes) -> bytes:
    return data


def test_a_false_worker_that_was_written_to_redis_is_sent_nothing(redis: RedisServer) -> None:
    """Regression: who could write Redis was sent the bearer token in clear within a second, and prompts after that."""

    async def main() -> None:
        async with router_of(redis) as (router, client), impostor(echo) as (address, called):
            false = record("d9", address=address, role="decode")
            while await num_refused(router) < 3:
                write(redis, "d9", forged(redis, false))
                await asyncio.sleep(0.05)
            with pytest.raises(UnavailableError):
                await client.pair(CALL)
            assert called == []
            assert list(await client.workers()) == []

    asyncio.run(asyncio.wait_for(main(), 6 * PATIENT_S))


def test_who_takes_the_address_of_a_worker_that_ended_is_sent_nothing(redis: RedisServer) -> None:
    """The record is genuine and still counts; what listens at its address is not."""

    async def main() -> None:
        discovery = RedisDiscovery(redis.url, AS_WORKER, ttl_s=3.0, timeout_s=PATIENT_S)
        stub = StubWorker(status("d0", Role.DECODE))
        async with router_of(redis) as (_, client):
            async with serving_worker(stub) as server:
                await discovery.announce(record("d0", address=server.address, role="decode"))
                await eventually(lambda: stub.num_watchers == 1)
            async with impostor(echo, server.address) as (_, called):
                await discovery.announce(record("d0", address=server.address, role="decode"))
                await eventually(lambda: len(called) >= 3)
                with pytest.raises(UnavailableError):
                    await client.pair(CALL)
                assert set(called) == {methods.OPEN.name}
        await discovery.close()

    asyncio.run(asyncio.wait_for(main(), 6 * PATIENT_S))
