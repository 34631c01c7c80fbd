"""Chat completions as the SDK reads them, whole and streamed, and what their fields become."""

from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from tandem.core.errors import InvalidRequestError
from tandem.core.scope import CacheScope
from tandem.core.types import FinishReason
from tests.helpers.fake_backend import MODEL, FakeCluster, sdk, tell, text_of

MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]
CHAT = {"model": MODEL, "messages": MESSAGES, "seed": 1, "max_tokens": 6}
COMPLETION = {"model": MODEL, "prompt": "abc", "seed": 1, "max_tokens": 6}


def test_the_sdk_chats_whole_and_streamed(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        async with sdk(cluster) as api:
            whole = await api.chat.completions.create(model=MODEL, messages=MESSAGES, seed=1, max_tokens=6)
            assert whole.choices[0].message.content == text_of(1, 6)
            assert whole.choices[0].finish_reason == "length"
            assert whole.usage is not None
            assert whole.usage.prompt_tokens_details is not None
            assert (whole.usage.completion_tokens, whole.usage.prompt_tokens_details.cached_tokens) == (6, 3)
            options: Any = {"include_usage": True}
            stream = await api.chat.completions.create(
                model=MODEL,
                messages=MESSAGES,
                seed=1,
                max_completion_tokens=6,
                stream=True,
                stream_options=options,
                n=2,
            )
            chunks = [chunk async for chunk in stream]
        roles = [c.delta.role for chunk in chunks for c in chunk.choices]
        assert [role for role in roles if role] == ["assistant"] * 2
        texts = ["", ""]
        for chunk in chunks:
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
        assert texts[0] == text_of(1, 6)
        assert len(texts[1]) == 6
        assert texts[1] != texts[0]
        assert chunks[-1].choices == []
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == 12
        assert all(chunk.usage is None for chunk in chunks[:-1])
        assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
        assert len({chunk.id for chunk in chunks}) == 1

    tell(tmp_path, story)


def test_the_sdks_own_accumulator_takes_the_stream(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        cluster.workers[0].last_reason = FinishReason.STOP
        async with (
            sdk(cluster) as api,
            api.chat.completions.stream(
                model=MODEL, messages=MESSAGES, seed=1, max_tokens=6, logprobs=True, top_logprobs=2
            ) as stream,
        ):
            final = await stream.get_final_completion()
        assert final.choices[0].message.content == text_of(1, 6)
        logprobs = final.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.content is not None
        assert "".join(entry.token for entry in logprobs.content) == text_of(1, 6)
        assert [len(entry.top_logprobs) for entry in logprobs.content] == [2] * 6

    tell(tmp_path, story)


def test_extras_of_the_engine_reach_the_worker_over_the_models_defaults(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        cluster.routers[0].sampling_defaults |= {"temperature": 0.6, "top_p": 0.9}
        asked = CHAT | {
            "temperature": 0.0,
            "top_k": -1,
            "min_p": 0.1,
            "stop": "zz",
            "stop_token_ids": [9],
            "logit_bias": {"7": -2},
            "bad_words": ["no"],
            "ignore_eos": True,
            "speculate": "off",
            "priority": -3,
            "cache_salt": "tenant",
            "prompt_cache_key": "session",
            "user": "somebody",
            "metadata": {"a": "b"},
            "unheard_of": None,
        }
        response = await client.post("/v1/chat/completions", json=asked)
        assert response.status_code == 200, response.text
        call, pair = cluster.workers[0].calls[-1], cluster.routers[0].calls[-1]
        params = call.params
        assert (params.temperature, params.top_p, params.top_k, params.min_p) == (0.0, 0.9, 0, 0.1)
        assert (params.stop, params.stop_token_ids, params.logit_bias) == (("zz",), (9,), {7: -2.0})
        assert (len(params.bad_words), params.speculate) == (2, "off")
        assert (call.priority, pair.session_id) == (-3, "session")
        assert call.scope == pair.scope == CacheScope(salt="tenant")
        assert (pair.num_expected_output, pair.token_ids) == (6, call.prompt_token_ids)

    tell(tmp_path, story)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_drafter_that_the_worker_does_not_have_is_a_wrong_field(tmp_path: Path, stream: bool) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        cluster.workers[0].refuse = InvalidRequestError("speculate='ngram' is not available: use off or auto")
        response = await client.post("/v1/chat/completions", json=CHAT | {"speculate": "ngram", "stream": stream})
        assert response.status_code == 400
        error = response.json()["error"]
        assert (error["param"], "use off or auto" in error["message"]) == ("speculate", True)

    tell(tmp_path, story)


def test_usage_comes_with_every_chunk_when_asked_for(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        options = {"include_usage": True, "continuous_usage_stats": True}
        asked = CHAT | {"stream": True, "stream_options": options, "return_token_ids": True}
        frames = (await client.post("/v1/chat/completions", json=asked)).text.split("\n\n")
        values = [orjson.loads(frame[6:]) for frame in frames if frame.startswith("data: {")]
        counts = [value["usage"]["completion_tokens"] for value in values]
        assert counts == sorted(counts)
        assert (counts[0] >= 1, counts[-1]) == (True, 6)
        token_ids = [token_id for value in values for c in value["choices"] for token_id in c.get("token_ids", ())]
        assert len(token_ids) == 6
        assert values[0]["prompt_token_ids"] == list(cluster.workers[0].calls[0].prompt_token_ids)
        plain = (await client.post("/v1/chat/completions", json=CHAT | {"stream": True})).text
        assert "usage" not in plain

    tell(tmp_path, story)
