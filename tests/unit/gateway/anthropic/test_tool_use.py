"""Tools, thinking and structured answers as Anthropic's SDK uses them, in strict mode, against a served gateway."""

import asyncio
import json
from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic import beta_async_tool, beta_tool
from pydantic import BaseModel

from tests.helpers.fake_backend import MODEL
from tests.unit.gateway.anthropic.talking import NUM_CACHED, Scene, events, play

WEATHER: Any = {
    "name": "weather",
    "description": "The weather of a place.",
    "input_schema": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
}
ASK: list[Any] = [{"role": "user", "content": "What is it like in Paris?"}]
ARGUMENTS = {"place": 'Paris, ]}" <b>é'}
CALL = "<tool_call>\n" + json.dumps({"name": "weather", "arguments": ARGUMENTS}) + "\n</tool_call>"
THOUGHT = "<think>\nParis is a place.\n</think>\n\n"
BODY = {"model": MODEL, "max_tokens": 2000, "messages": ASK, "tools": [WEATHER]}


def test_a_call_and_its_result_make_a_conversation(tmp_path: Path) -> None:
    async def story(scene: Scene) -> None:
        async with scene.sdk() as api:
            called = await api.messages.create(model=MODEL, max_tokens=2000, messages=ASK, tools=[WEATHER])
            assert called.stop_reason == "tool_use"
            content: list[Any] = list(called.content)
            thought, said, use = content
            assert (thought.type, said.type, use.type) == ("thinking", "text", "tool_use")
            assert (use.name, use.input) == ("weather", ARGUMENTS)
            assert use.id.startswith("toolu_")
            assert '"name": "weather"' in scene.worker.last_prompt
            result: Any = {"type": "tool_result", "tool_use_id": use.id, "content": "sunny", "is_error": True}
            more: list[Any] = [
                *ASK,
                {"role": "assistant", "content": called.content},
                {"role": "user", "content": [result, {"type": "text", "text": "And?"}]},
            ]
            answered = await api.messages.create(model=MODEL, max_tokens=2000, messages=more, tools=[WEATHER])
            counted = await api.messages.count_tokens(model=MODEL, messages=more, tools=[WEATHER])
        assert (answered.stop_reason, [block.type for block in answered.content]) == ("end_turn", ["text"])
        prompt = scene.worker.last_prompt
        assert "<think>\nParis is a place.\n</think>" in prompt
        assert "<tool_response>\nError: sunny\n</tool_response><|im_end|>\n<|im_start|>user\nAnd?" in prompt
        assert counted.input_tokens == len(scene.worker.calls[-1].prompt_token_ids)

    play(tmp_path, story, f"{THOUGHT}I look.{CALL}", "Sunny.")


@pytest.mark.parametrize("burst", [1, 7, 1000])
def test_a_stream_of_thinking_text_and_calls_is_what_the_whole_is(tmp_path: Path, burst: int) -> None:
    async def story(scene: Scene) -> None:
        async with scene.sdk() as api:
            whole = await api.messages.create(model=MODEL, max_tokens=2000, messages=ASK, tools=[WEATHER])
            pieces: list[str] = []
            async with api.messages.stream(model=MODEL, max_tokens=2000, messages=ASK, tools=[WEATHER]) as stream:
                async for event in stream:
                    if event.type == "input_json":
                        pieces.append(event.partial_json)
                streamed = await stream.get_final_message()
        inputs = [block.input for block in streamed.content if block.type == "tool_use"]
        assert inputs == [ARGUMENTS, ARGUMENTS]
        assert [json.loads(text) for text in "".join(pieces).replace("}{", "}\n{").splitlines()] == inputs

        def plain(message: Any) -> list[Any]:
            return [{k: v for k, v in block.to_dict().items() if k != "id"} for block in message.content]

        assert plain(streamed) == plain(whole)
        assert (streamed.stop_reason, streamed.usage.output_tokens) == ("tool_use", whole.usage.output_tokens)
        assert streamed.usage.output_tokens_details == whole.usage.output_tokens_details
        assert streamed.usage.input_tokens == whole.usage.input_tokens
        assert streamed.usage.cache_read_input_tokens == NUM_CACHED

    answer = f"{THOUGHT}I look.{CALL}\n{CALL}"
    play(tmp_path, story, answer, answer, burst=burst)


def test_blocks_have_dense_indexes_and_begin_empty(tmp_path: Path) -> None:
    async def story(scene: Scene) -> None:
        response = await scene.client.post("/v1/messages", json=BODY | {"stream": True})
        told = events(response.content)
        open_index, next_index, kinds = None, 0, []
        for name, value in told[1:-2]:
            if name == "content_block_start":
                assert (open_index, value["index"]) == (None, next_index)
                open_index, next_index = next_index, next_index + 1
                kinds.append(value["content_block"]["type"])
                if kinds[-1] == "tool_use":
                    assert value["content_block"]["input"] == {}
            else:
                assert value["index"] == open_index
                open_index = None if name == "content_block_stop" else open_index
        assert kinds == ["thinking", "text", "tool_use"]
        deltas = [value["delta"] for name, value in told if name == "content_block_delta"]
        json_deltas = [delta["partial_json"] for delta in deltas if delta["type"] == "input_json_delta"]
        assert json_deltas[0] == ""
        assert json.loads("".join(json_deltas)) == ARGUMENTS
        (signed,) = [delta["signature"] for delta in deltas if delta["type"] == "signature_delta"]
        assert signed
        assert told[-2][1]["delta"]["stop_reason"] == "tool_use"

    play(tmp_path, story, f"{THOUGHT}I look.\n{CALL}")


def test_thinking_that_is_omitted_keeps_its_signature_only(tmp_path: Path) -> None:
    async def story(scene: Scene) -> None:
        thinking: Any = {"type": "adaptive", "display": "omitted"}
        async with scene.sdk() as api:
            whole = await api.messages.create(model=MODEL, max_tokens=2000, messages=ASK, thinking=thinking)
            async with api.messages.stream(model=MODEL, max_tokens=2000, messages=ASK, thinking=thinking) as stream:
                streamed = await stream.get_final_message()
        for message in (whole, streamed):
            content: list[Any] = list(message.content)
            thought, said = content
            assert (thought.type, said.type) == ("thinking", "text")
            assert (thought.thinking, bool(thought.signature), said.text) == ("", True, "Hello")
        assert whole.content[0] == streamed.content[0]

    play(tmp_path, story, f"{THOUGHT}Hello", f"{THOUGHT}Hello")


def test_budgets_reach_the_worker_and_are_checked(tmp_path: Path) -> None:
    async def story(scene: Scene) -> None:
        enabled: Any = {"type": "enabled", "budget_tokens": 1500}
        async with scene.sdk() as api:
            await api.messages.create(model=MODEL, max_tokens=2000, messages=ASK, thinking=enabled)
            with pytest.raises(anthropic.BadRequestError, match="below max_tokens=1500"):
                await api.messages.create(model=MODEL, max_tokens=1500, messages=ASK, thinking=enabled)
            reasoning = scene.worker.calls[-1].params.reasoning
            assert reasoning is not None
            assert reasoning.max_tokens == 1500
            await api.messages.create(model=MODEL, max_tokens=2000, messages=ASK, thinking={"type": "disabled"})
        assert scene.worker.last_prompt.endswith("<think>\n\n</think>\n\n")

    play(tmp_path, story, f"{THOUGHT}Hello", "Hello")


class Answer(BaseModel):
    number: int


def test_parse_asks_for_a_schema_and_reads_the_answer(tmp_path: Path) -> None:
    async def story(scene: Scene) -> None:
        async with scene.sdk() as api:
            parsed = await api.messages.parse(
                model=MODEL, max_tokens=2000, messages=ASK, output_format=Answer, thinking={"type": "disabled"}
            )
            older = await scene.client.post(
                "/v1/messages",
                json={k: v for k, v in BODY.items() if k != "tools"}
                | {"output_format": {"type": "json_schema", "schema": Answer.model_json_schema()}},
            )
        assert parsed.parsed_output == Answer(number=42)
        assert older.status_code == 200, older.text
        assert all(call.params.grammar for call in scene.worker.calls)

    play(tmp_path, story, '{"number": 42}', '{"number": 42}')


def test_a_choice_of_tools_is_enforced_or_refused(tmp_path: Path) -> None:
    async def story(scene: Scene) -> None:
        for choice, is_forced in ({"type": "any"}, True), ({"type": "tool", "name": "weather"}, True):
            response = await scene.client.post("/v1/messages", json=BODY | {"tool_choice": choice})
            assert response.status_code == 200, response.text
            assert (scene.worker.calls[-1].params.grammar is not None) is is_forced
        response = await scene.client.post("/v1/messages", json=BODY | {"tool_choice": {"type": "none"}})
        assert response.json()["content"][0]["text"] == "No."
        assert "weather" not in scene.worker.last_prompt

    play(tmp_path, story, CALL, CALL, "No.")


def test_the_tool_runner_goes_on_without_threads(tmp_path: Path) -> None:
    """It asks for a thread, is refused, and sends everything with each request from then on."""

    async def story(scene: Scene) -> None:
        asked: list[str] = []

        @beta_async_tool
        async def weather(place: str) -> str:
            """The weather of a place.

            Args:
                place: where
            """
            asked.append(place)
            return "sunny"

        async with scene.sdk() as api:
            runner = api.beta.messages.tool_runner(
                model=MODEL, max_tokens=2000, messages=ASK, tools=[weather], system="be brief"
            )
            final = await runner.until_done()
        assert asked == [ARGUMENTS["place"]]
        assert final.content[-1].to_dict()["text"] == "Sunny."
        assert len(scene.worker.calls) == 2
        prompt = scene.worker.last_prompt
        assert "be brief" in prompt
        assert "What is it like in Paris?" in prompt
        assert "<tool_response>\nsunny\n</tool_response>" in prompt

    play(tmp_path, story, f"{THOUGHT}{CALL}", "Sunny.")


def test_the_blocking_and_streaming_runner_too(tmp_path: Path) -> None:
    async def story(scene: Scene) -> None:
        @beta_tool
        def weather(place: str) -> str:
            """The weather of a place."""
            raise ValueError(f"no such place: {place}")

        def run() -> str:
            with scene.blocking_sdk() as api:
                runner = api.beta.messages.tool_runner(
                    model=MODEL, max_tokens=2000, messages=ASK, tools=[weather], stream=True
                )
                texts: list[str] = []
                for stream in runner:
                    texts += [event.text for event in stream if event.type == "text"]
                return "".join(texts)

        assert await asyncio.to_thread(run) == "Unknown."
        assert "<tool_response>\nError: " in scene.worker.last_prompt
        assert "no such place" in scene.worker.last_prompt

    play(tmp_path, story, CALL, "Unknown.")


def test_an_answer_goes_on_with_the_last_message(tmp_path: Path) -> None:
    async def story(scene: Scene) -> None:
        begun: list[Any] = [*ASK, {"role": "assistant", "content": "It is ("}]
        async with scene.sdk() as api:
            message = await api.messages.create(model=MODEL, max_tokens=2000, messages=begun)
        assert message.content[0].to_dict()["text"] == "sunny)"
        assert scene.worker.last_prompt.endswith("<|im_start|>assistant\nIt is (")

    play(tmp_path, story, "sunny)")


def test_what_is_kept_is_told_as_written_whole_and_streamed(tmp_path: Path) -> None:
    async def story(scene: Scene) -> None:
        system: Any = [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
        short: Any = {"type": "ephemeral"}
        async with scene.sdk() as api:
            whole = await api.messages.create(
                model=MODEL, max_tokens=2000, messages=ASK, system=system, cache_control=short
            )
            usage = whole.usage
            num_system = scene.num_tokens("<|im_start|>system\nbe brief")
            num_asked = scene.num_tokens(f"<|im_end|>\n<|im_start|>user\n{ASK[0]['content']}")
            assert [pin.num_tokens for pin in scene.worker.calls[-1].pins] == [num_system, num_system + num_asked]
            assert usage.cache_creation is not None
            assert usage.cache_creation.ephemeral_1h_input_tokens == num_system
            assert usage.cache_creation.ephemeral_5m_input_tokens == num_asked
            total = usage.input_tokens + (usage.cache_creation_input_tokens or 0) + (usage.cache_read_input_tokens or 0)
            assert total == len(scene.worker.calls[-1].prompt_token_ids)
            other: Any = [{"role": "user", "content": "something else"}]
            async with api.messages.stream(model=MODEL, max_tokens=2000, messages=other, cache_control=short) as stream:
                streamed = (await stream.get_final_message()).usage
        assert streamed.cache_creation is not None
        assert streamed.cache_creation_input_tokens == streamed.cache_creation.ephemeral_5m_input_tokens > 10

    play(tmp_path, story, "ok", "ok")


def test_a_request_as_claude_code_makes_it(tmp_path: Path) -> None:
    """Its accounting, new in every request, is kept out of the prompt, or no prefix would ever be found again."""

    def body(accounting: str) -> dict[str, Any]:
        kept = {"type": "ephemeral", "ttl": "1h"}
        system = [
            {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1; cch={accounting};"},
            {"type": "text", "text": "You are a careful engineer.", "cache_control": kept},
            {"type": "text", "text": "Rules. " * 20, "cache_control": kept | {"scope": "global"}},
        ]
        tools = [WEATHER | {"name": f"tool_{index}", "eager_input_streaming": True} for index in range(8)]
        reminder = {"type": "text", "text": "<system-reminder>now</system-reminder>"}
        question = {"type": "text", "text": "fix it", "cache_control": {"type": "ephemeral"}}
        thought = {"type": "thinking", "thinking": "hm", "signature": "from elsewhere"}
        use = {"type": "tool_use", "id": "toolu_01D7FLrfh4GYq7yT1ULFeyMV", "name": "tool_3", "input": {"place": "x"}}
        result = {"type": "tool_result", "tool_use_id": use["id"], "content": [{"type": "text", "text": "done"}]}
        return {
            "model": MODEL,
            "system": system,
            "tools": tools,
            "messages": [
                {"role": "user", "content": [reminder, question]},
                {"role": "assistant", "content": [thought, use]},
                {"role": "user", "content": [result, reminder]},
            ],
            "metadata": {"user_id": '{"device_id":"d","session_id":"s"}'},
            "max_tokens": 2000,
            "thinking": {"type": "adaptive"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "output_config": {"effort": "medium"},
            "stream": True,
        }

    async def story(scene: Scene) -> None:
        headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "claude-code-20250219,effort-2025-11-24"}
        prompts = []
        for accounting in ("a", "b"):
            response = await scene.client.post("/v1/messages?beta=true", json=body(accounting), headers=headers)
            assert response.status_code == 200, response.text
            assert events(response.content)[-1][0] == "message_stop"
            prompts.append(scene.worker.last_prompt)
        assert prompts[0] == prompts[1]
        assert "billing" not in prompts[0]
        assert "<think>\nhm\n</think>" in prompts[0]
        counted = await scene.client.post(
            "/v1/messages/count_tokens?beta=true",
            json={k: v for k, v in body("c").items() if k not in ("stream", "max_tokens", "metadata")},
        )
        assert counted.json()["input_tokens"] == len(scene.worker.calls[-1].prompt_token_ids)

    play(tmp_path, story, "ok", "ok", burst=1)


def test_a_call_that_is_cut_short_is_said_as_far_as_it_goes(tmp_path: Path) -> None:
    async def story(scene: Scene) -> None:
        short = BODY | {"max_tokens": len("I look.")}
        message = (await scene.client.post("/v1/messages", json=short)).json()
        assert (message["stop_reason"], message["content"][0]["text"]) == ("max_tokens", "I look.")

    play(tmp_path, story, f"I look.{CALL}")
