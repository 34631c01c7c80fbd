"""Completions as the SDK and lm-eval read them."""

from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from tests.helpers.fake_backend import MODEL, FakeCluster, sdk, tell, text_of

MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]
CHAT = {"model": MODEL, "messages": MESSAGES, "seed": 1, "max_tokens": 6}
COMPLETION = {"model": MODEL, "prompt": "abc", "seed": 1, "max_tokens": 6}


def test_the_sdk_completes_whole_and_streamed(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        async with sdk(cluster) as api:
            whole = await api.completions.create(model=MODEL, prompt=["ab", "cd"], seed=1, n=2, logprobs=1)
            assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
            assert whole.choices[0].text == whole.choices[2].text == text_of(1, 16)
            assert whole.usage is not None
            assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (4, 64)
        # NOTE: its strict types have no chunk before the last, since each must have a finish reason.
        async with sdk(cluster, is_strict=False) as api:
            stream = await api.completions.create(
                model=MODEL, prompt=[64, 65], seed=1, max_tokens=6, echo=True, stream=True
            )
            text = "".join([chunk.choices[0].text async for chunk in stream])
            assert text == "ab" + text_of(1, 6)

    tell(tmp_path, story)


def test_a_scored_prompt_has_one_position_a_token_and_no_probability_for_the_first(tmp_path: Path) -> None:
    """Request in the form of lm-eval: a batch of token ids, echoed, with logprobs and one new token."""

    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        asked = COMPLETION | {"prompt": [[64, 65, 66], [67]], "echo": True, "logprobs": 1, "max_tokens": 1}
        choices = (await client.post("/v1/completions", json=asked)).json()["choices"]
        assert choices[0]["logprobs"]["token_logprobs"] == [None, -0.5, -0.5, -0.5]
        assert choices[0]["logprobs"]["tokens"] == ["a", "b", "c", text_of(1, 1)]
        assert choices[0]["logprobs"]["text_offset"] == [0, 1, 2, 3]
        assert choices[0]["text"] == "abc" + text_of(1, 1)
        assert len(choices[1]["logprobs"]["tokens"]) == 2
        assert all(call.local_prefill for call in cluster.routers[0].calls)
        streamed = await client.post("/v1/completions", json=asked | {"stream": True})
        frames = [orjson.loads(frame[6:]) for frame in streamed.text.split("\n\n") if frame.startswith("data: {")]
        first = next(frame["choices"][0] for frame in frames if frame["choices"][0]["index"] == 0)
        assert first["logprobs"] == choices[0]["logprobs"]

    tell(tmp_path, story)


@pytest.mark.parametrize(("logprobs", "of_prompt"), [(1, 5), (5, 1), (0, 3)])
def test_an_echo_and_scores_of_the_prompt_have_as_many_alternatives_as_each_was_asked_for(
    logprobs: int, of_prompt: int, tmp_path: Path
) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        alone = {"echo": True, "logprobs": logprobs}, {"prompt_logprobs": of_prompt}
        (echo,), (scores,) = [
            (await client.post("/v1/completions", json=COMPLETION | options)).json()["choices"] for options in alone
        ]
        (both,) = (await client.post("/v1/completions", json=COMPLETION | alone[0] | alone[1])).json()["choices"]
        assert both["logprobs"] == echo["logprobs"]
        assert both["prompt_logprobs"] == scores["prompt_logprobs"]

    tell(tmp_path, story)


def test_a_prompt_is_scored_without_an_answer(tmp_path: Path) -> None:
    """Regression: `max_tokens: 0`, which evaluations send to score a text, was refused."""

    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        asked = COMPLETION | {"prompt": [[64, 65, 66], [67]], "echo": True, "logprobs": 1, "max_tokens": 0}
        answer = (await client.post("/v1/completions", json=asked)).json()
        first, second = answer["choices"]
        assert (first["text"], first["finish_reason"]) == ("abc", "length")
        assert first["logprobs"]["tokens"] == ["a", "b", "c"]
        assert first["logprobs"]["token_logprobs"] == [None, -0.5, -0.5]
        assert second["logprobs"]["token_logprobs"] == [None]
        assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (4, 0)
        streamed = await client.post("/v1/completions", json=asked | {"prompt": "abc", "stream": True})
        frames = [orjson.loads(frame[6:]) for frame in streamed.text.split("\n\n") if frame.startswith("data: {")]
        assert "".join(frame["choices"][0]["text"] for frame in frames) == "abc"
        assert frames[0]["choices"][0]["logprobs"] == first["logprobs"]
        assert frames[-1]["choices"][0]["finish_reason"] == "length"
        (plain,) = (await client.post("/v1/completions", json=COMPLETION | {"max_tokens": 0})).json()["choices"]
        assert (plain["text"], plain["logprobs"]) == ("", None)

    tell(tmp_path, story)
