"""Paid prefixes are written once, read afterwards, and counted the same in every API."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from tests.helpers.fake_backend import MODEL, FakeCluster, tell
from tests.helpers.redis_server import running_redis

TEXT = "x" * 64
HOUR = {"type": "ephemeral", "ttl": "1h"}
FIVE_MINUTES = {"type": "ephemeral"}
HALF_AN_HOUR = {"mode": "explicit"}
SHARED = {"model": MODEL, "seed": 1}


def message(control: dict[str, Any] | None, text: str = TEXT) -> dict[str, Any]:
    block = {"type": "text", "text": text} | ({} if control is None else {"cache_control": control})
    return SHARED | {"max_tokens": 2, "messages": [{"role": "user", "content": [block]}]}


def chat(text: str = TEXT) -> dict[str, Any]:
    part = {"type": "text", "text": text, "prompt_cache_breakpoint": HALF_AN_HOUR}
    return SHARED | {"max_tokens": 2, "messages": [{"role": "user", "content": [part]}]}


async def anthropic_usage(client: httpx.AsyncClient, body: dict[str, Any]) -> tuple[int, int, int, int]:
    """(input, read, written for five minutes, written for an hour)."""
    answer = await client.post("/v1/messages", json=body)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    created = usage["cache_creation"]
    assert usage["cache_creation_input_tokens"] == sum(created.values())
    return (
        usage["input_tokens"],
        usage["cache_read_input_tokens"],
        created["ephemeral_5m_input_tokens"],
        created["ephemeral_1h_input_tokens"],
    )


async def openai_usage(client: httpx.AsyncClient, body: dict[str, Any]) -> tuple[int, int, int]:
    """(all, read, written)."""
    usage = (await client.post("/v1/chat/completions", json=body)).json()["usage"]
    details = usage["prompt_tokens_details"]
    return usage["prompt_tokens"], details["cached_tokens"], details["cache_write_tokens"]


def test_a_prefix_is_written_once_and_then_read_whichever_api_asks(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        worker = cluster.workers[0]
        worker.num_cached_tokens = 0
        num_prompt = sum(await anthropic_usage(client, message(None)))
        kept = (1 + len("user\n") + 64) // 16 * 16  # the template's beginning, then the text
        assert await openai_usage(client, chat()) == (num_prompt, 0, kept)
        assert [(pin.num_tokens, pin.ttl_s) for pin in worker.calls[-1].pins] == [(70, 1800.0)]
        worker.num_cached_tokens = kept
        assert await openai_usage(client, chat()) == (num_prompt, kept, 0)
        assert await anthropic_usage(client, message(FIVE_MINUTES)) == (num_prompt - kept, kept, 0, 0)
        assert await anthropic_usage(client, message(HOUR)) == (num_prompt - kept, kept, 0, 0)

    tell(tmp_path, story)


def test_five_minutes_are_not_an_hour(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        worker = cluster.workers[0]
        worker.num_cached_tokens = 0
        rest, read, short, long = await anthropic_usage(client, message(FIVE_MINUTES))
        assert (read, long) == (0, 0)
        assert short >= 48
        worker.num_cached_tokens = short
        assert await anthropic_usage(client, message(HOUR)) == (rest, 0, 0, short)
        assert await anthropic_usage(client, message(HOUR)) == (rest, short, 0, 0)

    tell(tmp_path, story)


def test_what_no_worker_keeps_is_not_billed(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        cluster.workers[0].grants_pins = False
        for _ in range(2):
            assert (await anthropic_usage(client, message(HOUR)))[1:] == (3, 0, 0)

    tell(tmp_path, story)


def test_what_only_the_worker_that_goes_on_keeps_is_billed_once(tmp_path: Path) -> None:
    """The bug: only the pins of the worker that was lost were noted."""

    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        first, second = cluster.workers
        first.num_cached_tokens = second.num_cached_tokens = 0
        first.grants_pins, first.fail_at = False, 1
        assert (await anthropic_usage(client, message(HOUR)))[3] >= 48
        assert second.calls
        first.grants_pins, first.fail_at = True, None
        assert (await anthropic_usage(client, message(HOUR)))[3] == 0

    tell(tmp_path, story)


def test_a_client_that_left_after_the_first_token_has_what_it_paid_for(tmp_path: Path) -> None:
    """And what it was told with that token was right: clients look at the first figures only."""

    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        worker = cluster.workers[0]
        worker.num_cached_tokens, worker.hold_at = 0, 1
        async with client.stream("POST", "/v1/messages", json=message(HOUR) | {"stream": True}) as answer:
            lines = answer.aiter_lines()
            assert await anext(lines) == "event: message_start"
            data = await anext(lines)
            await worker.reached.wait()
        told = orjson.loads(data.removeprefix("data: "))["message"]["usage"]["cache_creation"]
        assert told["ephemeral_1h_input_tokens"] >= 48
        worker.hold_at = None
        assert (await anthropic_usage(client, message(HOUR)))[3] == 0

    tell(tmp_path, story)


def test_a_client_that_left_before_the_first_token_has_paid_for_nothing(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        worker = cluster.workers[0]
        worker.num_cached_tokens, worker.hold_at = 0, 0
        leaving = asyncio.create_task(client.post("/v1/messages", json=message(HOUR)))
        await worker.reached.wait()
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        worker.hold_at = None
        assert (await anthropic_usage(client, message(HOUR)))[3] >= 48

    tell(tmp_path, story)


@pytest.mark.parametrize("is_away", [False, True])
def test_gateways_of_one_redis_share_what_was_paid_and_bill_nothing_without_it(tmp_path: Path, is_away: bool) -> None:
    with running_redis() as server:

        async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
            cluster.workers[0].num_cached_tokens = 0
            if is_away:
                server.kill()
            assert ((await anthropic_usage(client, message(HOUR)))[3] > 0) is not is_away

        tell(tmp_path, story, redis=server.url)

        async def another(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
            assert (await anthropic_usage(client, message(HOUR)))[3] == 0

        tell(tmp_path, another, redis=server.url)
