"""Clients with keys: admission, remaining limits, and bills whatever becomes of a request."""

import asyncio
import contextlib
import json
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

import anthropic
import httpx
import openai
import orjson
import pytest

from tandem.accounts.charge import LedgerEntry
from tandem.accounts.key import KeyLimits, new_key
from tandem.accounts.ledger_query import LedgerQuery
from tandem.accounts.money import parse_nanos
from tandem.accounts.prices import Prices
from tandem.accounts.store import AccountStore, Spending
from tandem.accounts.usage import Usage
from tests.helpers.fake_backend import JSON_HEAD, MODEL, FakeCluster, eventually, tell
from tests.helpers.redis_server import RedisServer, running_redis

MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]
CHAT = {"model": MODEL, "messages": MESSAGES, "seed": 1, "max_tokens": 6}
COMPLETION = {"model": MODEL, "prompt": "abc", "seed": 1, "max_tokens": 6}
PATHS = {"/v1/chat/completions": CHAT, "/v1/completions": COMPLETION, "/v1/messages": CHAT}


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


@pytest.fixture(params=["file", "redis"])
def accounts(request: pytest.FixtureRequest, tmp_path: Path, redis: RedisServer) -> str:
    if request.param == "redis":
        with contextlib.closing(redis.client()) as client:
            client.flushall()
        return redis.url
    return str(tmp_path / "accounts.db")


_THREE_TOKENS = b'inter_token_latency_seconds_count{engine="0",model_name="tiny"} 2.0'


def store_of(cluster: FakeCluster) -> AccountStore:
    accounts = cluster.gateway.gateway.accounts
    assert accounts is not None
    return accounts.store


async def add_key(cluster: FakeCluster, name: str = "test", tenant: str | None = None, **more: Any) -> tuple[str, str]:
    """Id and secret of a new key."""
    own = {field: more.pop(field) for field in ("models", "cache_group", "is_admin") if field in more}
    key, secret = new_key(name, int(time.time()), tenant, limits=KeyLimits(**more), **own)
    await store_of(cluster).add_key(key)
    return key.key_id, secret


def bearer(secret: str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret}"}


async def ledger(cluster: FakeCluster) -> list[LedgerEntry]:
    return list(await store_of(cluster).entries(LedgerQuery()))


def test_only_keys_get_in_and_the_rest_is_told_in_its_own_words(tmp_path: Path, accounts: str) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        _, secret = await add_key(cluster)
        wrong = [{}, bearer("none"), bearer(secret[:-1] + ("A" if secret[-1] != "A" else "B")), {"x-api-key": ""}]
        wrong += [bearer("sk-tandem-000000000000-" + "a" * 43), {"authorization": f"Basic {secret}"}]
        for headers in wrong:
            for path, body in PATHS.items():
                refused = await client.post(path, json=body, headers=headers)
                assert refused.status_code == 401, headers
                assert refused.headers["www-authenticate"] == "Bearer"
                assert "x-request-id" in refused.headers
                error = refused.json()["error"]
                if path == "/v1/messages":
                    assert (refused.json()["type"], error["type"]) == ("error", "authentication_error")
                    assert refused.json()["request_id"] == refused.headers["request-id"]
                else:
                    assert error["code"] == "invalid_api_key"
        assert (await client.get("/v1/models")).status_code == 401
        assert (await client.post("/v1/messages/count_tokens", json=CHAT)).status_code == 401
        for path in ("/health", "/ready", "/version", "/docs", "/openapi.json"):
            assert (await client.get(path)).status_code == 200, path
        both = bearer("some-other-service") | {"x-api-key": secret}
        for headers in (bearer(secret), {"x-api-key": secret}, both, {"authorization": f"bearer  {secret}"}):
            assert (await client.get("/v1/models", headers=headers)).status_code == 200
            for path, body in PATHS.items():
                assert (await client.post(path, json=body, headers=headers)).status_code == 200, headers
        assert not any(call.request_id == "never" for call in cluster.workers[0].calls)

    tell(tmp_path, story, accounts=accounts)


def test_a_refused_sender_is_told_before_it_sends(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        host, port = cluster.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n")
        assert b"401" in await asyncio.wait_for(reader.readline(), 5)
        writer.close()
        await writer.wait_closed()

    tell(tmp_path, story, accounts=str(tmp_path / "a.db"))


def test_revoked_keys_are_out(tmp_path: Path, accounts: str) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        key_id, secret = await add_key(cluster)
        assert (await client.post("/v1/completions", json=COMPLETION, headers=bearer(secret))).status_code == 200
        assert await store_of(cluster).revoke_key(key_id, 1)
        refused = await client.post("/v1/completions", json=COMPLETION, headers=bearer(secret))
        assert (refused.status_code, "revoked" in refused.text) == (401, True)
        gateway = cluster.gateway.gateway
        assert gateway.accounts is not None
        await gateway.accounts.refresh()
        assert (await client.get("/v1/models", headers=bearer(secret))).status_code == 401

    tell(tmp_path, story, accounts=accounts)


def test_what_is_left_is_in_the_headers_of_each_api(tmp_path: Path, accounts: str) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        limits: dict[str, Any] = {
            "requests_per_minute": 60,
            "input_tokens_per_minute": 6000,
            "output_tokens_per_minute": 600,
        }
        for path, body in PATHS.items():
            for is_stream in (False, True):
                _, secret = await add_key(cluster, **limits)
                got = await client.post(path, json={**body, "stream": is_stream}, headers=bearer(secret))
                assert got.status_code == 200
                found = {name: value for name, value in got.headers.items() if "ratelimit" in name}
                if path == "/v1/messages":
                    assert found.pop("anthropic-ratelimit-requests-limit") == "60"
                    assert found.pop("anthropic-ratelimit-requests-remaining") == "59"
                    assert found.pop("anthropic-ratelimit-output-tokens-remaining") == "594"
                    assert found["anthropic-ratelimit-tokens-remaining"] == "594"
                    assert len(found) == 9
                    reset = datetime.fromisoformat(found["anthropic-ratelimit-output-tokens-reset"])
                    assert -1 < (reset - datetime.now(UTC)).total_seconds() < 3
                else:
                    assert found["x-ratelimit-limit-requests"] == "60"
                    assert found["x-ratelimit-remaining-requests"] == "59"
                    assert found["x-ratelimit-reset-requests"] == "1s"
                    assert found["x-ratelimit-limit-tokens"] == "600"
                    assert found["x-ratelimit-remaining-tokens"] == "594"
                    assert found["x-ratelimit-reset-tokens"] == "600ms"
                    assert len(found) == 6

    tell(tmp_path, story, accounts=accounts)


def test_limits_say_when_to_come_back_and_budgets_that_it_is_useless(tmp_path: Path, accounts: str) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        for path, body in PATHS.items():
            _, secret = await add_key(cluster, requests_per_minute=1)
            assert (await client.post(path, json=body, headers=bearer(secret))).status_code == 200
            refused = await client.post(path, json=body, headers=bearer(secret))
            assert refused.status_code == 429
            assert 50 <= int(refused.headers["retry-after"]) <= 60
            error = refused.json()["error"]
            if path == "/v1/messages":
                assert error["type"] == "rate_limit_error"
                assert refused.headers["anthropic-ratelimit-requests-remaining"] == "0"
            else:
                assert (error["type"], error["code"]) == ("requests", "rate_limit_exceeded")
                assert refused.headers["x-ratelimit-remaining-requests"] == "0"
            _, poor = await add_key(cluster, budget_nanos=parse_nanos("0.00001"))
            refused = await client.post(path, json=body, headers=bearer(poor))
            assert (refused.status_code, refused.headers["x-should-retry"]) == (402, "false")
            assert "retry-after" not in refused.headers
            error = refused.json()["error"]
            assert error["type"] == ("billing_error" if path == "/v1/messages" else "insufficient_quota")
            assert "max_tokens" in error["message"]
            _, other = await add_key(cluster, models=("another",))
            refused = await client.post(path, json=body, headers=bearer(other))
            assert (refused.status_code, refused.json()["error"]["type"]) == (403, "permission_error")
        assert len(cluster.workers[0].calls) == 3

    tell(tmp_path, story, accounts=accounts)


def test_the_sdks_understand_what_they_are_told(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        _, secret = await add_key(cluster, requests_per_minute=2)
        _, poor = await add_key(cluster, budget_nanos=1)
        async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key=secret, max_retries=0) as api:
            await api.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=2)
            async with anthropic.AsyncAnthropic(base_url=cluster.url, api_key=secret, max_retries=0) as other:
                await other.messages.create(model=MODEL, messages=MESSAGES, max_tokens=2)
                with pytest.raises(anthropic.RateLimitError):
                    await other.messages.create(model=MODEL, messages=MESSAGES, max_tokens=2)
            with pytest.raises(openai.RateLimitError):
                await api.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=2)
        async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="sk-wrong") as api:
            with pytest.raises(openai.AuthenticationError):
                await api.models.list()
        async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key=poor, max_retries=3) as api:
            with pytest.raises(openai.APIStatusError, match="402"):
                await api.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=2)
        _, admin = await add_key(cluster, is_admin=True)
        rejected = (await client.get("/metrics", headers=bearer(admin))).text
        assert 'rejected_total{reason="insufficient_quota"} 1.0' in rejected

    tell(tmp_path, story, accounts=str(tmp_path / "a.db"))


def test_one_after_the_other_never_meets_its_own_concurrency(tmp_path: Path, accounts: str) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        key_id, secret = await add_key(cluster, concurrency=1)
        for index in range(30):
            body = CHAT | {"stream": index % 2 == 0}
            assert (await client.post("/v1/chat/completions", json=body, headers=bearer(secret))).status_code == 200
        worker = cluster.workers[0]
        worker.hold_at = 2
        running = asyncio.create_task(client.post("/v1/chat/completions", json=CHAT, headers=bearer(secret)))
        await worker.reached.wait()
        assert (await store_of(cluster).spending(key_id)).num_open == 1
        refused = await client.post("/v1/chat/completions", json=CHAT, headers=bearer(secret))
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        worker.go.set()
        assert (await running).status_code == 200

    tell(tmp_path, story, accounts=accounts)


@pytest.mark.parametrize("is_stream", [False, True])
def test_what_was_used_is_in_the_ledger_before_the_last_byte(tmp_path: Path, accounts: str, is_stream: bool) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        key_id, secret = await add_key(cluster, tenant="acme")
        body = {**COMPLETION, "prompt": ["abc", "defg"], "n": 2, "stream": is_stream}
        await client.post("/v1/completions", json=body, headers=bearer(secret) | {"x-request-id": "mine"})
        (entry,) = await ledger(cluster)
        assert (entry.key_id, entry.tenant, entry.model, entry.request_id) == (key_id, "acme", MODEL, "mine")
        assert (entry.usage.num_input + entry.usage.num_read, entry.usage.num_output) == (7, 24)
        assert entry.outcome == "done"
        assert entry.cost_nanos == Prices(input=2_000_000, cache_read=0).cost_nanos(entry.usage)
        assert await store_of(cluster).spending(key_id) == Spending(entry.cost_nanos, 0, 0)

    tell(tmp_path, story, accounts=accounts, prices='{"input": 2, "output": 5, "cache_read": 0}')


@pytest.mark.parametrize("is_stream", [False, True])
def test_who_leaves_pays_what_was_generated(tmp_path: Path, accounts: str, is_stream: bool) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        key_id, secret = await add_key(cluster)
        worker = cluster.workers[0]
        for hold_at in (3, 0):
            worker.hold_at = hold_at
            worker.reached.clear()
            host, port = cluster.url.removeprefix("http://").split(":")
            _, writer = await asyncio.open_connection(host, int(port))
            content = orjson.dumps({**COMPLETION, "stream": is_stream})
            head = f"POST /v1/completions HTTP/1.1\r\n{JSON_HEAD}x-api-key: {secret}\r\n"
            writer.write(f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
            await worker.reached.wait()
            if hold_at:
                await eventually(lambda: _THREE_TOKENS in cluster.gateway.gateway.metrics.text())
            left_s = time.monotonic()
            writer.close()
            await writer.wait_closed()
            await eventually(lambda: worker.num_open == 0)
            assert worker.cancelled_at_s[-1] - left_s < 10.0
        async with asyncio.timeout(5):
            while len(entries := await ledger(cluster)) < 2:
                await asyncio.sleep(0.01)
        assert [entry.outcome for entry in entries] == ["aborted", "aborted"]
        assert entries[0].usage == Usage(num_read=3, num_output=3)
        assert (entries[1].usage, entries[1].cost_nanos) == (Usage(), 0)
        assert await store_of(cluster).spending(key_id) == Spending(entries[0].cost_nanos, 0, 0)

    tell(tmp_path, story, accounts=accounts, num_workers=1)


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_checkpoint_says_what_the_client_got_so_far(tmp_path: Path, redis: RedisServer, is_stream: bool) -> None:
    """Of an answer that is sent whole that is nothing until its end."""

    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        key_id, secret = await add_key(cluster)
        worker, accounts = cluster.workers[0], cluster.gateway.gateway.accounts
        assert accounts is not None
        worker.hold_at = 3
        body = {**COMPLETION, "stream": is_stream}
        asking = asyncio.create_task(client.post("/v1/completions", json=body, headers=bearer(secret)))
        await worker.reached.wait()
        await eventually(lambda: _THREE_TOKENS in cluster.gateway.gateway.metrics.text())
        expected = ["3"] if is_stream else []
        async with asyncio.timeout(5):  # NOTE: what was counted a moment ago may not be sent yet
            while True:
                await accounts.renew()
                found = checkpoints_of(redis, key_id)
                if [checkpoint["num_output"] for checkpoint in found] == expected:
                    break
        worker.go.set()
        assert (await asking).status_code == 200
        (entry,) = await ledger(cluster)
        assert (entry.outcome, entry.usage.num_output) == ("done", 6)
        assert not checkpoints_of(redis, key_id)

    with contextlib.closing(redis.client()) as client:
        client.flushall()
    tell(tmp_path, story, accounts=redis.url, num_workers=1)


def checkpoints_of(redis: RedisServer, key_id: str) -> list[dict[str, str]]:
    """Records that would be billed for a key's running requests if their gateway ended."""
    with contextlib.closing(redis.client()) as client:
        held = cast(dict[bytes, bytes], client.hgetall(f"{{tandem:accounts}}:held:{key_id}"))
    return [orjson.loads(value) for name, value in held.items() if name.endswith(b"+")]


def test_a_failover_is_paid_once(tmp_path: Path, accounts: str) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        _, secret = await add_key(cluster)
        cluster.workers[0].fail_at = 3
        await client.post("/v1/completions", json={**COMPLETION, "stream": True}, headers=bearer(secret))
        assert cluster.workers[1].calls
        (entry,) = await ledger(cluster)
        assert (entry.usage.num_input + entry.usage.num_read, entry.usage.num_output) == (3, 6)

    tell(tmp_path, story, accounts=accounts)


def test_who_got_nothing_pays_nothing(tmp_path: Path, accounts: str) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        key_id, secret = await add_key(cluster, requests_per_minute=1)
        (worker,) = cluster.workers
        for fail_at in (0, 3):
            worker.fail_at = fail_at
            failed = await client.post("/v1/completions", json=COMPLETION, headers=bearer(secret))
            assert failed.status_code == 503
        bad = await client.post("/v1/completions", json={**COMPLETION, "max_tokens": -1}, headers=bearer(secret))
        assert bad.status_code == 400
        assert [(entry.outcome, entry.cost_nanos) for entry in await ledger(cluster)] == [("refunded", 0)] * 2
        stream = await client.post("/v1/completions", json={**COMPLETION, "stream": True}, headers=bearer(secret))
        assert "error" in stream.text
        last = (await ledger(cluster))[-1]
        assert (last.outcome, last.usage) == ("failed", Usage(num_read=3, num_output=3))
        assert await store_of(cluster).spending(key_id) == Spending(last.cost_nanos, 0, 0)

    tell(tmp_path, story, accounts=accounts, num_workers=1, max_attempts=1)


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_warm_up_pays_for_its_prompt_alone(tmp_path: Path, accounts: str, is_stream: bool) -> None:
    """The token it takes is told to nobody."""

    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        _, secret = await add_key(cluster)
        asked = {**CHAT, "max_tokens": 0, "stream": is_stream}
        answer = await client.post("/v1/messages", json=asked, headers=bearer(secret))
        assert answer.status_code == 200
        (entry,) = await ledger(cluster)
        num_prompt = len(cluster.workers[0].calls[0].prompt_token_ids)
        assert (entry.outcome, entry.usage.num_output) == ("done", 0)
        assert entry.usage.num_input + entry.usage.num_read == num_prompt
        assert entry.cost_nanos == Prices().cost_nanos(entry.usage) > 0

    tell(tmp_path, story, accounts=accounts, num_workers=1)


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_scored_prompt_pays_for_itself_alone(tmp_path: Path, accounts: str, is_stream: bool) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        prompt_nanos = Prices().cost_nanos(Usage(num_input=3))
        _, secret = await add_key(cluster, budget_nanos=prompt_nanos)
        asked = {**COMPLETION, "max_tokens": 0, "echo": True, "logprobs": 0, "stream": is_stream}
        answer = await client.post("/v1/completions", json=asked, headers=bearer(secret))
        assert answer.status_code == 200, "the token that is dropped is not reserved either"
        (entry,) = await ledger(cluster)
        assert (entry.outcome, entry.usage.num_input + entry.usage.num_read, entry.usage.num_output) == ("done", 3, 0)

    tell(tmp_path, story, accounts=accounts, num_workers=1)


def test_an_admin_manages_keys_over_http(tmp_path: Path, accounts: str) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        _, admin = await add_key(cluster, is_admin=True)
        _, plain = await add_key(cluster)
        for method, path in (("GET", "keys"), ("POST", "keys"), ("GET", "usage"), ("GET", "workers")):
            for headers, status in ((bearer(plain), 403), ({}, 401)):
                refused = await client.request(method, f"/admin/{path}", headers=headers, json={"name": "x"})
                assert refused.status_code == status
        asked = {"name": "new", "tenant": "acme", "concurrency": 3, "budget": "1.5", "models": [MODEL]}
        made = await client.post("/admin/keys", json=asked, headers=bearer(admin))
        assert (made.status_code, made.headers["cache-control"]) == (201, "no-store")
        value = made.json()
        secret = value.pop("secret")
        assert (value["tenant"], value["budget"], value["limits"]["concurrency"]) == ("acme", "1.5", 3)
        used = await client.post("/v1/completions", json=COMPLETION, headers=bearer(secret))
        assert used.status_code == 200
        shown = (await client.get(f"/admin/keys/{value['key_id']}", headers=bearer(admin))).json()
        assert shown["spent"] == "0.0000303"
        listed = await client.get("/admin/keys", headers=bearer(admin))
        assert shown in listed.json()["keys"]
        assert secret not in listed.text
        assert "digest" not in listed.text
        csv = await client.get("/admin/usage?format=csv&by=tenant,model", headers=bearer(admin))
        assert csv.headers["content-type"].startswith("text/csv")
        assert csv.text.splitlines()[1] == f"acme,{MODEL},1,0,0,0,3,6,0.0000303"
        rows = (await client.get("/admin/usage", headers=bearer(admin))).json()
        assert [(row["tenant"], row["num_output"], row["outcome"]) for row in rows] == [("acme", 6, "done")]
        bad: list[tuple[str, dict[str, Any]]] = [
            ("/admin/keys", {"name": ""}),
            ("/admin/keys", {}),
            ("/admin/keys", {"name": "x", "budget": "-1"}),
        ]
        bad += [("/admin/keys", {"name": "x", "concurrency": 0}), ("/admin/keys", {"name": "x", "extra": 1})]
        for path, body in bad:
            assert (await client.post(path, json=body, headers=bearer(admin))).status_code == 400, body
        names: list[dict[str, Any]] = [{"\ud800": 1}, {"name": "\ud800"}, {"tenant": "\ud800"}, {"models": ["\ud800"]}]
        for fields in names:  # NOTE: JSON can spell a surrogate
            spelled, headers = json.dumps({"name": "x"} | fields), bearer(admin) | {"content-type": "application/json"}
            refused = await client.post("/admin/keys", content=spelled, headers=headers)
            assert refused.status_code == 400, fields
        for query in ("by=colour", "since=yesterday", "format=xml", "limit=0"):
            assert (await client.get(f"/admin/usage?{query}", headers=bearer(admin))).status_code == 400, query
        gone = await client.delete(f"/admin/keys/{value['key_id']}", headers=bearer(admin))
        assert gone.status_code == 200
        assert (await client.get("/v1/models", headers=bearer(secret))).status_code == 401
        for method in ("GET", "DELETE"):
            assert (await client.request(method, "/admin/keys/no", headers=bearer(admin))).status_code == 404

    tell(tmp_path, story, accounts=accounts)


def test_each_tenant_sees_its_own_requests_only(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        secrets = {name: (await add_key(cluster, name, tenant))[1] for name, tenant in _TENANTS.items()}
        _, admin = await add_key(cluster, is_admin=True)
        sent = bearer(secrets["a"]) | {"x-request-id": "mine"}
        await client.post("/v1/completions", json=COMPLETION, headers=sent)
        for secret, status in ((secrets["a"], 200), (secrets["b"], 404), (secrets["same"], 200), (admin, 200)):
            found = await client.get("/admin/requests/mine", headers=bearer(secret))
            assert found.status_code == status

    tell(tmp_path, story, accounts=str(tmp_path / "a.db"))


def test_a_tenant_is_not_shown_what_errors_say_to_operators(tmp_path: Path) -> None:
    """The bug: the timeline of a tenant's request had the addresses of workers, and the messages of bugs."""

    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        (_, secret), (_, admin) = await add_key(cluster), await add_key(cluster, is_admin=True)
        (worker,) = cluster.workers
        worker.end_early_at, worker.lifecycle = 3, "draining"
        sent = bearer(secret) | {"x-request-id": "mine"}
        said = (await client.post("/v1/completions", json=COMPLETION, headers=sent)).json()["error"]["message"]
        own, whole = [(await client.get("/admin/requests/mine", headers=bearer(key))).json() for key in (secret, admin)]
        assert worker.server is not None
        address = worker.server.address
        assert address in str(whole)
        assert address not in str(own)
        assert (own["error"], own["state"]) == (said, whole["state"])
        assert [stage["name"] for stage in own["stages"]] == [stage["name"] for stage in whole["stages"]]

    tell(tmp_path, story, accounts=str(tmp_path / "a.db"), num_workers=1, failover_timeout_s=0.1)


_TENANTS = {"a": "acme", "same": "acme", "b": "other"}


def test_names_that_reach_workers_are_each_tenants_own(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        more = {name: {"tenant": tenant} for name, tenant in _TENANTS.items()}
        more |= {"g1": {"cache_group": "team"}, "g2": {"cache_group": "team"}, "team": {"tenant": "team"}}
        salts, sessions = {}, {}
        for name, own in more.items():
            _, secret = await add_key(cluster, name, **own)
            body = {**COMPLETION, "cache_salt": "s", "prompt_cache_key": "k"}
            await client.post("/v1/completions", json=body, headers=bearer(secret))
            assert cluster.routers[0].calls[-1].scope == cluster.workers[0].calls[-1].scope
            salts[name], sessions[name] = (
                cluster.routers[0].calls[-1].scope.salt,
                cluster.routers[0].calls[-1].session_id,
            )
        assert salts["a"] == salts["same"]
        assert salts["g1"] == salts["g2"]
        assert len({salts[name] for name in ("a", "b", "g1", "team")}) == 4
        assert sessions["a"] == sessions["same"]
        assert len(set(sessions.values())) == len(sessions) - 1
        _, secret = await add_key(cluster, "plain", tenant="acme")
        await client.post("/v1/completions", json=COMPLETION, headers=bearer(secret))
        assert cluster.routers[0].calls[-1].scope.salt not in salts.values()
        assert cluster.routers[0].calls[-1].session_id is None

    tell(tmp_path, story, accounts=str(tmp_path / "a.db"))


def test_without_accounts_everything_is_as_ever(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        body = {**COMPLETION, "cache_salt": "s"}
        answer = await client.post("/v1/completions", json=body, headers={"x-request-id": "mine"} | bearer("any"))
        assert answer.status_code == 200
        assert not [name for name in answer.headers if "ratelimit" in name]
        assert cluster.routers[0].calls[0].scope.salt == "s"
        assert (await client.get("/admin/requests/mine")).status_code == 200
        assert (await client.get("/admin/keys")).status_code == 404

    tell(tmp_path, story)


@pytest.mark.parametrize("when_lost", ["refuse", "allow"])
def test_while_redis_is_away(tmp_path: Path, when_lost: str, caplog: pytest.LogCaptureFixture) -> None:
    """Refused; or served, and billed once it is back."""

    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        key_id, secret = await add_key(cluster, requests_per_minute=1000)
        assert (await client.post("/v1/completions", json=COMPLETION, headers=bearer(secret))).status_code == 200
        with server.paused():
            answer = await client.post("/v1/completions", json=COMPLETION, headers=bearer(secret))
            assert answer.status_code == (503 if when_lost == "refuse" else 200)
            assert "x-ratelimit-limit-requests" not in answer.headers
            if when_lost == "refuse":
                assert (
                    answer.json()["error"]["message"]
                    == "this server's accounts are temporarily not available; try again"
                )
                assert any("the store of accounts" in record.getMessage() for record in caplog.records)
        gateway = cluster.gateway.gateway
        accounts = gateway.accounts
        assert accounts is not None
        await eventually(lambda: accounts.settlements.num_waiting == 0)
        outcomes = [entry.outcome for entry in await ledger(cluster)]
        assert sorted(outcomes) == sorted(["done", "refunded" if when_lost == "refuse" else "done"])
        spending = await store_of(cluster).spending(key_id)
        assert (spending.num_open, spending.held_nanos) == (0, 0)
        assert spending.spent_nanos == sum(entry.cost_nanos for entry in await ledger(cluster))
        assert (await client.post("/v1/completions", json=COMPLETION, headers=bearer(secret))).status_code == 200

    with running_redis() as server:
        tell(tmp_path, story, accounts=server.url, accounts_when_lost=when_lost)


def test_keys_of_the_wire_are_never_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", logger="tandem")
    seen: list[str] = []

    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        _, secret = await add_key(cluster, requests_per_minute=1)
        seen.append(secret)
        for _ in range(2):
            await client.post("/v1/completions", json=COMPLETION, headers=bearer(secret))

    tell(tmp_path, story, accounts=str(tmp_path / "a.db"))
    assert seen[0] not in caplog.text
    assert seen[0][:20] not in caplog.text
