"""Text that a moderator does not let pass is neither asked nor said, and every API reports it in its own words."""

from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from tandem.gateway.moderation.base import ModerationVerdict
from tests.helpers.fake_backend import MODEL, FakeCluster, eventually, sdk, tell, text_of

HERE = "python:tests.unit.gateway.test_moderation"
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "seed": 1, "max_tokens": 8}
MESSAGE = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "seed": 1, "max_tokens": 8}
RESPONSE = {"model": MODEL, "input": "hi", "seed": 1, "max_output_tokens": 8}
COMPLETION = {"model": MODEL, "prompt": "hi", "seed": 1, "max_tokens": 8}


class Strict:
    """Lets pass what is shorter than `length` characters."""

    window = 1
    overlap = 0

    def __init__(self, length: int) -> None:
        self._length = length
        self._text = ""

    async def judge(self, text: str, *, num_judged: int = 0, may_go_on: bool = False) -> ModerationVerdict:
        self._text += text
        return ModerationVerdict("long" if len(self._text) >= self._length else None)

    async def close(self) -> None: ...


def nothing_passes() -> Strict:
    return Strict(0)


def three_letters_stop() -> Strict:
    return Lenient(3)


class Lenient(Strict):
    """Judges answers only, which have no line feeds here."""

    async def judge(self, text: str, *, num_judged: int = 0, may_go_on: bool = False) -> ModerationVerdict:
        return ModerationVerdict() if "\n" in text else await super().judge(text)


class Piece(Strict):
    """Refuses texts with `piece` in them."""

    def __init__(self, piece: str) -> None:
        self._piece = piece
        self.overlap = len(piece)

    async def judge(self, text: str, *, num_judged: int = 0, may_go_on: bool = False) -> ModerationVerdict:
        return ModerationVerdict("piece" if self._piece in text else None)


def four_letters_stop() -> Piece:
    return Piece(text_of(1, 20)[10:14])


def never_stop() -> Piece:
    return Piece("0000")


def events(text: str) -> list[dict[str, Any]]:
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: {")]
    return [orjson.loads(line) for line in lines]


def test_a_prompt_that_may_not_be_asked_reaches_no_worker(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        chat = (await client.post("/v1/chat/completions", json=CHAT)).json()
        assert (chat["choices"][0]["finish_reason"], chat["choices"][0]["message"]["content"]) == ("content_filter", "")
        completion = (await client.post("/v1/completions", json=COMPLETION | {"echo": True, "logprobs": 1})).json()
        assert completion["choices"][0]["finish_reason"] == "content_filter"
        message = (await client.post("/v1/messages", json=MESSAGE)).json()
        assert message["stop_reason"] == "refusal"
        response = (await client.post("/v1/responses", json=RESPONSE)).json()
        assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "content_filter"})
        streamed = await client.post("/v1/chat/completions", json=CHAT | {"stream": True})
        assert events(streamed.text)[-1]["choices"][0]["finish_reason"] == "content_filter"
        assert streamed.text.endswith("data: [DONE]\n\n")
        message = events((await client.post("/v1/messages", json=MESSAGE | {"stream": True})).text)
        assert [event["delta"]["stop_reason"] for event in message if event["type"] == "message_delta"] == ["refusal"]
        assert cluster.workers[0].calls == []
        assert cluster.routers[0].calls == []

    tell(tmp_path, story, moderation=f"{HERE}:nothing_passes")


@pytest.mark.parametrize("is_stream", [False, True])
def test_an_answer_is_stopped_where_it_may_not_go_on_and_so_is_its_worker(tmp_path: Path, is_stream: bool) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        worker = cluster.workers[0]
        worker.hold_at = 5
        async with sdk(cluster) as api:
            more: dict[str, Any] = {"extra_headers": {"x-request-id": "stopped"}}
            if is_stream:
                chunks = [chunk async for chunk in await api.chat.completions.create(**CHAT, **more, stream=True)]
                text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
                reason = chunks[-1].choices[0].finish_reason
            else:
                choice = (await api.chat.completions.create(**CHAT, **more)).choices[0]
                text, reason = choice.message.content, choice.finish_reason
        assert reason == "content_filter"
        assert (await client.get("/admin/requests/stopped")).json()["state"] == "filtered"
        assert text in (text_of(1, 0), text_of(1, 1), text_of(1, 2))  # NOTE: letters may come together
        await eventually(lambda: worker.num_open == 0)

    tell(tmp_path, story, moderation=f"{HERE}:three_letters_stop")


def test_logprobs_do_not_tell_what_the_text_may_not(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        asked = CHAT | {"logprobs": True, "return_token_ids": True}
        choice = (await client.post("/v1/chat/completions", json=asked)).json()["choices"][0]
        assert choice["finish_reason"] == "content_filter"
        assert choice["token_ids"] == []
        assert choice["logprobs"]["content"] == []
        found = events((await client.post("/v1/chat/completions", json=asked | {"stream": True})).text)
        assert not any(choice.get("token_ids") for event in found for choice in event["choices"])

    tell(tmp_path, story, moderation=f"{HERE}:three_letters_stop")


@pytest.mark.parametrize("is_blocked", [True, False])
def test_no_field_tells_what_is_blocked(tmp_path: Path, is_blocked: bool) -> None:
    whole = text_of(1, 20)

    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        tokenizer = cluster.workers[0].tokenizer
        asked = {"seed": 1, "max_tokens": 20, "return_token_ids": True}
        chat = CHAT | asked | {"logprobs": True}
        for path, body in (("chat/completions", chat), ("completions", COMPLETION | asked | {"logprobs": 0})):
            (choice,) = (await client.post(f"/v1/{path}", json=body)).json()["choices"]
            streamed = (await client.post(f"/v1/{path}", json=body | {"stream": True})).text
            for told in ([choice], [choice for event in events(streamed) for choice in event["choices"]]):
                ids = [token_id for part in told for token_id in part.get("token_ids", ())]
                scores = [part["logprobs"] for part in told if part.get("logprobs")]
                tokens = [entry["token"] for score in scores for entry in score.get("content", ())]
                tokens += [token for score in scores for token in score.get("tokens", ())]
                assert (tokenizer.decode(ids) if ids else "") == "".join(tokens) == ("" if is_blocked else whole)
                assert told[-1]["finish_reason"] == ("content_filter" if is_blocked else "length")

    tell(tmp_path, story, moderation=f"{HERE}:{'four_letters' if is_blocked else 'never'}_stop")


def test_a_streamed_completion_tells_the_prompts_tokens_before_anything_was_judged(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        asked = COMPLETION | {"return_token_ids": True}
        whole = (await client.post("/v1/completions", json=asked)).json()["choices"][0]
        first, *later = events((await client.post("/v1/completions", json=asked | {"stream": True})).text)
        assert first["choices"][0]["prompt_token_ids"] == whole["prompt_token_ids"]
        assert not any("prompt_token_ids" in event["choices"][0] for event in later)

    tell(tmp_path, story, moderation=f"{HERE}:never_stop")


def test_a_moderator_that_cannot_be_asked_lets_nothing_pass(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        answer = await client.post("/v1/chat/completions", json=CHAT)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
        assert cluster.workers[0].calls == []

    tell(tmp_path, story, moderation="http://127.0.0.1:9/v1/moderations")
