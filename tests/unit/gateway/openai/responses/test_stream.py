"""Streams, held against a state machine that was written down apart from ours."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from tandem.core.errors import InvalidRequestError
from tests.helpers.fake_backend import eventually
from tests.helpers.fake_worker import MODEL
from tests.unit.gateway.openai.responses.machine import check_stream
from tests.unit.gateway.openai.responses.stage import Stage, frames_of, tell

TOOLS: list[Any] = [{"type": "function", "name": name, "parameters": {"type": "object"}} for name in ("f", "g")]
CALL = '<tool_call>\n{"name": "%s", "arguments": {"x": 1}}\n</tool_call>\n'
CALLS = CALL % "f" + CALL % "g"
ASKED = {"model": MODEL, "input": "hi", "stream": True}


@pytest.mark.parametrize("burst", [1, 3, 1000])
@pytest.mark.parametrize(
    ("answer", "kinds"),
    [
        ("hello", ["message"]),
        ("<think>hm</think>hello", ["reasoning", "message"]),
        ("<think>hm</think>", ["reasoning"]),
        (CALLS, ["function_call", "function_call"]),
        (f"<think>hm</think>I look.\n{CALLS}", ["reasoning", "message", "function_call", "function_call"]),
        ("", ["message"]),
    ],
)
def test_events_come_in_their_order(tmp_path: Path, burst: int, answer: str, kinds: list[str]) -> None:
    async def story(stage: Stage) -> None:
        streamed = await stage.client.post("/v1/responses", json=ASKED | {"tools": TOOLS})
        assert streamed.headers["content-type"] == "text/event-stream; charset=utf-8"
        response = check_stream(frames_of(streamed.text))
        assert [item["type"] for item in response["output"]] == kinds
        whole = (await stage.client.post("/v1/responses", json=ASKED | {"tools": TOOLS, "stream": False})).json()
        assert [_said(item) for item in whole["output"]] == [_said(item) for item in response["output"]]
        assert whole["usage"] == response["usage"]
        stored = (await stage.client.get(f"/v1/responses/{response['id']}")).json()
        assert stored == response
        again = await stage.client.get(f"/v1/responses/{response['id']}", params={"stream": "true"})
        assert check_stream(frames_of(again.text)) == response
        rest = await stage.client.get(f"/v1/responses/{response['id']}?stream=true&starting_after=1")
        assert frames_of(rest.text) == frames_of(again.text)[2:]

    tell(tmp_path, story, answer, answer, burst=burst)


@pytest.mark.parametrize(("answer", "max_tokens"), [("", 9), (CALLS, 40)])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_conversation_goes_on_after_an_answer_without_text(
    tmp_path: Path, answer: str, max_tokens: int, is_streamed: bool
) -> None:
    """The bug: the assistant's turn was missing, which templates of alternating roles refuse."""

    async def story(stage: Stage) -> None:
        first = ASKED | {"tools": TOOLS, "max_output_tokens": max_tokens, "stream": is_streamed}
        answered = await stage.client.post("/v1/responses", json=first)
        response = frames_of(answered.text)[-1]["response"] if is_streamed else answered.json()
        more = {"model": MODEL, "input": "go on", "previous_response_id": response["id"]}
        assert (await stage.client.post("/v1/responses", json=more)).status_code == 200
        assert stage.worker.last_prompt.count("<|im_start|>assistant\n<|im_end|>") == 1
        listed = (await stage.client.get(f"/v1/responses/{response['id']}/input_items")).json()["data"]
        assert [item["role"] for item in listed] == ["user"]

    tell(tmp_path, story, answer, "fine")


def _said(item: dict[str, Any]) -> Any:
    """Content and status of an item, without its ids."""
    if item["type"] == "function_call":
        return item["name"], item["arguments"], item["status"]
    return item["type"], item["status"], [part["text"] for part in item["content"]]


@pytest.mark.parametrize(("cut", "kind"), [(9, "reasoning"), (28, "message"), (60, "function_call")])
def test_an_answer_that_is_cut_is_incomplete(tmp_path: Path, cut: int, kind: str) -> None:
    async def story(stage: Stage) -> None:
        asked = ASKED | {"tools": TOOLS, "max_output_tokens": cut}
        response = check_stream(frames_of((await stage.client.post("/v1/responses", json=asked)).text))
        assert response["status"] == "incomplete"
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}
        last = response["output"][-1]
        assert (last["type"], last["status"]) == (kind, "incomplete")
        assert all(item["status"] == "completed" for item in response["output"][:-1])
        whole = (await stage.client.post("/v1/responses", json=asked | {"stream": False})).json()
        assert (whole["status"], whole["output"][-1]["status"]) == ("incomplete", "incomplete")
        more = {"model": MODEL, "input": "go on", "previous_response_id": response["id"]}
        assert (await stage.client.post("/v1/responses", json=more)).status_code == 200
        assert "go on" in stage.worker.last_prompt
        assert ('"name": "f"' in stage.worker.last_prompt) is False, "a call that was cut off was never made"

    answer = f"<think>hmm, so</think>I look.\n{CALLS}"
    tell(tmp_path, story, answer, answer, "fine", burst=1)


@pytest.mark.parametrize("is_background", [True, False])
def test_what_a_moderator_stops_is_incomplete(tmp_path: Path, is_background: bool) -> None:
    words = tmp_path / "words"
    words.write_text("bomb\n")

    async def story(stage: Stage) -> None:
        for text in ("hi", "a bomb"):
            asked = {**ASKED, "input": text}
            response = check_stream(frames_of((await stage.client.post("/v1/responses", json=asked)).text))
            assert response["status"] == "incomplete"
            assert response["incomplete_details"] == {"reason": "content_filter"}
            assert "bomb" not in str(response["output"])
            more = {**asked, "stream": False, "background": is_background}
            whole = (await stage.client.post("/v1/responses", json=more)).json()
            while whole["status"] in ("queued", "in_progress"):
                whole = (await stage.client.get(f"/v1/responses/{whole['id']}")).json()
            assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "content_filter"})
            assert "bomb" not in str(whole["output"])

    tell(tmp_path, story, *["this is how a bomb is made, namely"] * 2, moderation=f"blocklist:{words}")


@pytest.mark.parametrize("fail_at", [4, 8, 20])
def test_a_stream_that_breaks_says_so(tmp_path: Path, fail_at: int) -> None:
    async def story(stage: Stage) -> None:
        stage.worker.fail_at = fail_at
        stage.worker.failure = InvalidRequestError("no more")
        frames = frames_of((await stage.client.post("/v1/responses", json=ASKED)).text)
        response = check_stream(frames)
        assert response["status"] == "failed"
        assert "no more" in response["error"]["message"]
        assert "no more" in frames[-2]["message"]
        stored = (await stage.client.get(f"/v1/responses/{response['id']}")).json()
        assert stored == response
        more = {"model": MODEL, "input": "go on", "previous_response_id": response["id"]}
        refused = await stage.client.post("/v1/responses", json=more)
        assert (refused.status_code, "is failed" in refused.text) == (400, True)

    tell(tmp_path, story, "<think>hm</think>hello, world")


def test_what_fails_before_the_first_byte_has_a_status(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        stage.worker.refuse = InvalidRequestError("not this one")
        for is_stream in (True, False):
            got = await stage.client.post("/v1/responses", json=ASKED | {"stream": is_stream})
            assert (got.status_code, got.json()["error"]["message"]) == (400, "not this one")

    tell(tmp_path, story)


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_client_that_leaves_aborts_its_response(tmp_path: Path, is_stream: bool) -> None:
    async def story(stage: Stage) -> None:
        stage.worker.hold_at = 4
        asking = asyncio.create_task(stage.client.post("/v1/responses", json=ASKED | {"stream": is_stream}))
        await stage.worker.reached.wait()
        left_s = time.monotonic()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await eventually(lambda: stage.worker.num_open == 0)
        assert stage.worker.cancelled_at_s[0] - left_s < 10.0
        await eventually(lambda: stage.gateway.admission.num_open == 0)

    tell(tmp_path, story, "hello, world")
