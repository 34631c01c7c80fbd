"""Messages as Anthropic's SDK reads them in strict mode, whole and streamed; its errors; its token count."""

from itertools import groupby
from pathlib import Path
from typing import Any

import anthropic
import httpx
import orjson
import pytest
from anthropic import AsyncAnthropic

from tandem.core.errors import CapacityError, UnavailableError
from tandem.core.types import FinishReason
from tests.helpers.fake_backend import MAX_MODEL_LEN, MODEL, SAYS_JSON, FakeCluster, tell, text_of

MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]
BODY = {"model": MODEL, "messages": MESSAGES, "seed": 1, "max_tokens": 6}
PROMPT = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def sdk(cluster: FakeCluster) -> AsyncAnthropic:
    return AsyncAnthropic(
        base_url=cluster.url, api_key="none", max_retries=0, _strict_response_validation=True, timeout=20
    )


def events(body: bytes) -> list[tuple[str, dict[str, Any]]]:
    frames = [frame.split(b"\n") for frame in body.split(b"\n\n") if frame]
    return [(lines[0].removeprefix(b"event: ").decode(), orjson.loads(lines[1][6:])) for lines in frames]


def test_the_sdk_gets_a_whole_message(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        cluster.workers[0].last_reason = FinishReason.STOP
        async with sdk(cluster) as api:
            message = await api.messages.create(
                model=MODEL, system="be brief", messages=MESSAGES, max_tokens=6, extra_body={"seed": 1}
            )
            assert [block.to_dict() for block in message.content] == [
                {"type": "text", "text": text_of(1, 6), "citations": None}
            ]
            assert (message.stop_reason, message.stop_sequence, message.role) == ("end_turn", None, "assistant")
            counted = await api.messages.count_tokens(model=MODEL, system="be brief", messages=MESSAGES)
        usage = message.usage
        assert (usage.cache_read_input_tokens, usage.cache_creation_input_tokens, usage.output_tokens) == (3, 0, 6)
        prompt = cluster.workers[0].calls[-1].prompt_token_ids
        assert usage.input_tokens + 3 == len(prompt) == counted.input_tokens
        tokenizer = cluster.workers[0].tokenizer
        assert (
            tokenizer.decode(prompt, skip_special_tokens=False) == f"<|im_start|>system\nbe brief<|im_end|>\n{PROMPT}"
        )

    tell(tmp_path, story)


def test_the_sdks_accumulator_takes_the_stream(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        async with (
            sdk(cluster) as api,
            api.messages.stream(model=MODEL, messages=MESSAGES, max_tokens=6, extra_body={"seed": 1}) as stream,
        ):
            text = [part async for part in stream.text_stream]
            final = await stream.get_final_message()
        assert "".join(text) == text_of(1, 6)
        assert [block.type for block in final.content] == ["text"]
        assert (final.stop_reason, final.usage.output_tokens) == ("max_tokens", 6)

    tell(tmp_path, story)


def test_a_stream_is_a_strict_sequence_of_named_events(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        cluster.workers[0].burst = 3
        response = await client.post("/v1/messages?beta=true", json=BODY | {"stream": True})
        assert response.headers["content-type"].startswith("text/event-stream")
        told = events(response.content)
        assert [name for name, _ in groupby(name for name, _ in told)] == [
            "message_start",
            "content_block_start",
            "content_block_delta",
            "content_block_stop",
            "message_delta",
            "message_stop",
        ]
        assert all(name == value["type"] for name, value in told)
        start, last = told[0][1]["message"], told[-2][1]
        assert start["id"] == f"msg_{response.headers['request-id']}"
        assert start["usage"]["cache_creation"] == {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0}
        assert last["usage"]["output_tokens"] == 6
        for name in ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"):
            assert start["usage"][name] == last["usage"][name]
        assert start["usage"]["cache_read_input_tokens"] == 3

    tell(tmp_path, story)


def test_no_tokens_warm_the_cache_and_show_nothing(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        message = (await client.post("/v1/messages", json=BODY | {"max_tokens": 0})).json()
        assert (message["content"], message["stop_reason"], message["usage"]["output_tokens"]) == ([], "max_tokens", 0)
        assert cluster.workers[0].calls[-1].params.max_tokens == 1
        told = events((await client.post("/v1/messages", json=BODY | {"max_tokens": 0, "stream": True})).content)
        assert [name for name, _ in told] == ["message_start", "message_delta", "message_stop"]

    tell(tmp_path, story)


def test_fields_reach_the_worker_over_the_models_defaults(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        cluster.routers[0].sampling_defaults |= {"temperature": 0.6, "top_p": 0.9}
        more = {"temperature": 0.0, "top_k": 5, "stop_sequences": ["END", "\n\n"], "metadata": {"user_id": "u"}}
        more |= {"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}, "tools": []}
        more |= {"cache_control": {"type": "ephemeral"}, "speculate": "suffix"}
        response = await client.post("/v1/messages", json=BODY | more)
        assert response.status_code == 200, response.text
        params = cluster.workers[0].calls[-1].params
        assert (params.temperature, params.top_p, params.top_k, params.stop) == (0.0, 0.9, 5, ("END", "\n\n"))
        assert params.speculate == "suffix"

    tell(tmp_path, story)


WRONG: list[tuple[dict[str, Any], int, str, str]] = [
    ({"messages": []}, 400, "invalid_request_error", "messages is empty"),
    ({"max_tokens": -1}, 400, "invalid_request_error", "max_tokens"),
    ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens"),
    ({"temperature": "hot"}, 400, "invalid_request_error", "temperature='hot'"),
    ({"speculate": "guess"}, 400, "invalid_request_error", "'off', 'auto', 'ngram'"),
    ({"temperature": -1}, 400, "invalid_request_error", "temperature"),
    ({"stop_sequences": [""]}, 400, "invalid_request_error", "stop"),
    ({"model": "claude"}, 404, "not_found_error", "'claude'"),
    ({"tools": [{"name": "f", "input_schema": {}}]}, 400, "invalid_request_error", "not known to call tools"),
    (
        {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 2000},
        400,
        "invalid_request_error",
        "not known to think",
    ),
    ({"output_config": {"format": {}}}, 400, "invalid_request_error", "output_config.format="),
    ({"unheard_of": 1}, 400, "invalid_request_error", "unheard_of=1"),
    ({"cache_control": {"type": "ephemeral", "ttl": "2h"}}, 400, "invalid_request_error", "cache_control"),
    ({"system": "a" * MAX_MODEL_LEN}, 400, "invalid_request_error", "context"),
]


@pytest.mark.parametrize(("more", "status", "kind", "words"), WRONG, ids=[str(case[0])[:40] for case in WRONG])
def test_what_is_wrong_is_refused_in_anthropics_words(
    tmp_path: Path, more: dict[str, Any], status: int, kind: str, words: str
) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        response = await client.post("/v1/messages", json=BODY | more)
        value = response.json()
        assert (response.status_code, value["type"], value["error"]["type"]) == (status, "error", kind)
        assert words in value["error"]["message"]
        assert value["request_id"] == response.headers["request-id"]
        assert not cluster.workers[0].calls

    tell(tmp_path, story)


def test_threads_are_refused_so_that_the_tool_runner_goes_on_without(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        response = await client.post("/v1/messages", json=BODY | {"thread": {"type": "create"}})
        assert response.status_code == 400
        assert response.json()["error"]["details"] == {"error_code": "thread_unsupported_request"}

    tell(tmp_path, story)


def test_overload_and_absence_have_anthropics_statuses(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        async with sdk(cluster) as api:
            cluster.routers[0].refuse = CapacityError("all are full", 7.0)
            with pytest.raises(anthropic.RateLimitError) as full:
                await api.messages.create(model=MODEL, messages=MESSAGES, max_tokens=6)
            assert full.value.response.headers["retry-after"] == "7"
            cluster.routers[0].refuse = UnavailableError("nobody is there", 2.0)
            with pytest.raises(anthropic.APIStatusError, match="overloaded_error") as away:
                await api.messages.create(model=MODEL, messages=MESSAGES, max_tokens=6)
            assert away.value.status_code == 529

    tell(tmp_path, story)


def test_a_stream_that_breaks_ends_with_an_error_event(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        for worker in cluster.workers:
            worker.fail_at = 3
        response = await client.post("/v1/messages", json=BODY | {"stream": True})
        assert response.status_code == 200
        name, value = events(response.content)[-1]
        assert (name, value["type"], value["error"]["type"]) == ("error", "error", "overloaded_error")

    tell(tmp_path, story, failover_timeout_s=0.2)


def test_paths_of_this_api_have_its_errors_and_others_theirs(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        for path, method, status in (("/v1/messages", "GET", 405), ("/v1/messages/batches", "POST", 404)):
            response = await client.request(method, path)
            value = response.json()
            assert response.status_code == status
            assert (value["type"], value["request_id"]) == ("error", response.headers["request-id"])
        assert (await client.get("/v1/messagesx")).json()["error"]["code"] == "not_found"
        wrong = await client.post("/v1/messages/count_tokens", json={"model": MODEL, "messages": [{"role": "x"}]})
        assert (wrong.status_code, wrong.json()["type"]) == (400, "error")
        assert "messages.0.role='x'" in wrong.json()["error"]["message"]
        huge = await client.post("/v1/messages/count_tokens", content=b"x" * 2_000_000, headers=SAYS_JSON)
        assert (huge.status_code, huge.json()["error"]["type"]) == (413, "request_too_large")

    tell(tmp_path, story, max_body_mib=1.0)
