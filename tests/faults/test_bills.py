"""A gateway that is killed in the middle of a stream: what its client got is billed, once."""

import asyncio
import json
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest

from tandem.accounts.charge import LedgerEntry
from tandem.accounts.key import KeyLimits, new_key
from tandem.accounts.ledger_query import LedgerQuery
from tandem.accounts.prices import Prices
from tandem.accounts.redis_store import RedisAccounts
from tandem.accounts.store import Spending
from tandem.core.clock import SystemClock
from tests.faults.conftest import logs_shown
from tests.faults.matrix import Matrix, Row
from tests.faults.scene import WORKER_FLAGS
from tests.faults.states import State
from tests.faults.streams import PATIENCE_S
from tests.helpers.cluster import Cluster, running_cluster
from tests.helpers.redis_server import RedisServer

LEASE_S = 2.0
READ_S = 1.5  # NOTE: many renewals of the lease
MAX_TOKENS = 2000


@pytest.fixture(scope="module")
def billed_cluster(pytestconfig: pytest.Config, slow_model: Path, redis: RedisServer) -> Iterator[Cluster]:
    flags = ("--accounts", redis.url, "--accounts-lease-s", f"{LEASE_S:g}")
    extra = {"worker": WORKER_FLAGS, "gateway": flags}
    with (
        running_cluster(slow_model, gateways=2, extra=extra) as cluster,
        logs_shown(pytestconfig, cluster),
    ):
        yield cluster


Found = TypeVar("Found")


def with_store(redis: RedisServer, ask: Callable[[RedisAccounts], Coroutine[Any, Any, Found]]) -> Found:
    async def run() -> Found:
        store = RedisAccounts(redis.url, SystemClock(), timeout_s=5.0)
        try:
            return await ask(store)
        finally:
            await store.close()

    return asyncio.run(run())


def read_until_killed(cluster: Cluster, secret: str) -> int:
    """Stream from the first gateway, kill it in the middle; how many pieces came."""
    gateway = cluster.processes["gateway-0"]
    body = {"model": cluster.model, "prompt": "once", "max_tokens": MAX_TOKENS, "ignore_eos": True, "stream": True}
    headers = {"authorization": f"Bearer {secret}"}
    url = f"{cluster.topology.gateway_url(0)}/v1/completions"
    with (
        httpx.Client(trust_env=False, timeout=PATIENCE_S) as client,
        client.stream("POST", url, json=body, headers=headers) as answer,
    ):
        assert answer.status_code == 200
        lines = (line for line in answer.iter_lines() if line.startswith("data: "))
        num_pieces, began_s = 0, time.monotonic()
        try:
            for line in lines:
                num_pieces += json.loads(line.removeprefix("data: "))["choices"][0]["finish_reason"] is None
                if time.monotonic() - began_s >= READ_S:
                    gateway.kill()
        except httpx.HTTPError:
            return num_pieces
    pytest.fail(f"the answer had ended after {num_pieces} pieces, before its gateway was killed")


def test_what_a_killed_gateway_delivered_is_billed_up_to_its_last_checkpoint(
    billed_cluster: Cluster, redis: RedisServer, matrix: Matrix
) -> None:
    """It was billed to nobody."""
    key, secret = new_key("test", 1, limits=KeyLimits(concurrency=1, budget_nanos=10**12))
    with_store(redis, lambda store: store.add_key(key))
    assert read_until_killed(billed_cluster, secret) > 0

    def entries() -> list[LedgerEntry]:
        return list(with_store(redis, lambda store: store.entries(LedgerQuery(key_id=key.key_id))))

    killed_s = time.monotonic()
    billed_cluster.wait(entries, PATIENCE_S)  # NOTE: the other gateway bills it; nobody asks for this key
    free_s = time.monotonic() - killed_s
    (entry,) = entries()
    assert entry.outcome == "expired"
    assert 0 < entry.usage.num_output < MAX_TOKENS
    assert entry.usage.num_rated_input + entry.usage.num_read > 0
    assert entry.cost_nanos == Prices().cost_nanos(entry.usage)
    expected = Spending(entry.cost_nanos, 0, 0)
    assert with_store(redis, lambda store: store.spending(key.key_id)) == expected
    billed_cluster.processes["gateway-0"].restart()
    answer = httpx.post(
        f"{billed_cluster.topology.gateway_url(0)}/v1/completions",
        json={"model": billed_cluster.model, "prompt": "once", "max_tokens": 3, "ignore_eos": True},
        headers={"authorization": f"Bearer {secret}"},
        trust_env=False,
        timeout=PATIENCE_S,
    )
    assert answer.status_code == 200, answer.text
    first, second = entries()
    assert (first, second.outcome, second.usage.num_output) == (entry, "done", 3)
    spending = with_store(redis, lambda store: store.spending(key.key_id))
    assert spending == Spending(first.cost_nanos + second.cost_nanos, 0, 0)
    totals = with_store(redis, lambda store: store.totals())
    assert sum(total.cost_nanos for total in totals if total.key_id == key.key_id) == spending.spent_nanos
    matrix.append(Row("gateway", State.DECODING, "kill -9", "billed up to its checkpoint", free_s=free_s))
