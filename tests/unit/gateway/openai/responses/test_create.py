"""Responses as the official SDK, in strict mode, makes and reads them."""

import json
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from tests.helpers.fake_worker import MODEL
from tests.unit.gateway.openai.responses.stage import NUM_CACHED, Stage, tell

WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "description": "of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": False,
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


class Person(BaseModel):
    name: str
    age: int


def test_a_text_becomes_a_response(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        async with stage.sdk() as api:
            response = await api.responses.create(
                model=MODEL,
                input="hi",
                instructions="be brief",
                metadata={"a": "b"},
                temperature=0.5,
                top_p=0.9,
                max_output_tokens=20,
                user="me",
                prompt_cache_key="session",
            )
        assert response.output_text == "hello"
        assert (response.status, response.error, response.incomplete_details) == ("completed", None, None)
        assert (response.metadata, response.instructions, response.user) == ({"a": "b"}, "be brief", "me")
        assert (response.temperature, response.top_p, response.max_output_tokens) == (0.5, 0.9, 20)
        assert response.usage is not None
        assert response.usage.output_tokens == 5
        assert response.usage.total_tokens == response.usage.input_tokens + 5
        assert response.usage.input_tokens == len(stage.worker.calls[0].prompt_token_ids)
        details = response.usage.input_tokens_details
        assert (details.cached_tokens, details.cache_write_tokens) == (NUM_CACHED, 0)
        assert response.usage.output_tokens_details.reasoning_tokens == 0
        assert stage.worker.last_prompt == (
            "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        )
        params = stage.worker.calls[0].params
        assert (params.temperature, params.top_p, params.max_tokens) == (0.5, 0.9, 20)
        assert stage.router.calls[0].session_id == "session"

    tell(tmp_path, story, "hello")


def test_the_stream_helper_gets_the_same(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        async with stage.sdk() as api, api.responses.stream(model=MODEL, input="hi") as stream:
            deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
            final = await stream.get_final_response()
        assert "".join(deltas) == final.output_text == "hello, world"
        assert len(deltas) > 1
        assert final.usage is not None
        assert final.usage.output_tokens == 12

    tell(tmp_path, story, "hello, world")


def test_parsing_into_a_model_constrains_the_answer(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        async with stage.sdk() as api:
            response = await api.responses.parse(model=MODEL, input="who?", text_format=Person)
            async with api.responses.stream(model=MODEL, input="who?", text_format=Person) as stream:
                streamed = await stream.get_final_response()
        assert response.output_parsed == streamed.output_parsed == Person(name="Ada", age=36)
        grammar = stage.worker.calls[0].params.grammar
        assert grammar is not None
        assert "age" in grammar

    tell(tmp_path, story, *['</think>{"name": "Ada", "age": 36}'] * 2)


def test_thinking_is_an_item_of_its_own(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        async with stage.sdk() as api:
            response = await api.responses.create(
                model=MODEL, input="hi", reasoning={"effort": "low", "summary": "auto"}
            )
            async with api.responses.stream(model=MODEL, input="hi") as stream:
                final = await stream.get_final_response()
        assert (
            [item.type for item in response.output] == [item.type for item in final.output] == ["reasoning", "message"]
        )
        thought: Any = response.output[0]
        assert (thought.content[0].text.strip(), thought.summary) == ("let me see", [])
        assert response.output_text.strip() == "yes"
        assert response.usage is not None
        assert response.usage.output_tokens_details.reasoning_tokens == len("let me see")
        assert response.reasoning is not None
        assert response.reasoning.effort == "low"
        reasoning = stage.worker.calls[0].params.reasoning
        assert reasoning is not None
        assert reasoning.max_tokens is not None

    tell(tmp_path, story, *["<think>let me see</think>yes"] * 2)


def test_a_tool_loop_goes_on_from_the_previous_response(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        async with stage.sdk() as api:
            first = await api.responses.create(model=MODEL, input="weather in Oslo?", tools=[WEATHER])
            (call,) = [item for item in first.output if item.type == "function_call"]
            assert json.loads(call.arguments) == {"city": "Oslo"}
            output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
            second = await api.responses.create(
                model=MODEL, input=[output], tools=[WEATHER], previous_response_id=first.id, instructions="be brief"
            )
            assert second.output_text == "it rains"
            assert second.previous_response_id == first.id
            prompt = stage.worker.last_prompt
            await api.responses.create(model=MODEL, input="thanks", previous_response_id=second.id)
        turns = [turn.partition("\n")[0] for turn in prompt.split("<|im_start|>")[1:]]
        assert turns == ["tools", "system", "user", "assistant", "tool", "assistant"]
        assert "weather in Oslo?" in prompt
        assert '"city": "Oslo"' in prompt
        assert "rain" in prompt
        last = stage.worker.last_prompt
        assert "be brief" not in last, "instructions are not inherited"
        assert last.index("weather in Oslo?") < last.index("rain") < last.index("it rains") < last.index("thanks")

    tell(tmp_path, story, f"I look.\n{CALL}", "it rains", "you're welcome")


def test_a_call_that_is_no_json_can_be_repaired(tmp_path: Path) -> None:
    """It was stored, and nothing could ever go on from it: neither from the response nor from its items."""
    broken = CALL.replace('"Oslo"', '"Oslo",')

    async def story(stage: Stage) -> None:
        async with stage.sdk() as api:
            first = await api.responses.create(model=MODEL, input="weather?", tools=[WEATHER])
            (call,) = [item for item in first.output if item.type == "function_call"]
            assert call.arguments == '{"city": "Oslo",}'
            output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "Error: no JSON"}
            await api.responses.create(model=MODEL, input=[output], previous_response_id=first.id, tools=[WEATHER])
            ask: Any = {"role": "user", "content": "weather?"}
            kept: Any = [ask, *(item.to_dict() for item in first.output), output]
            await api.responses.create(model=MODEL, input=kept, tools=[WEATHER], store=False)
        chained, sent = stage.worker.calls[1:]
        assert chained.prompt_token_ids == sent.prompt_token_ids
        shown = json.dumps({"arguments": call.arguments})
        assert f'"arguments": {shown}}}\n</tool_call>' in stage.worker.last_prompt

    tell(tmp_path, story, broken, CALL, CALL)


def test_items_that_a_client_keeps_itself_say_the_same(tmp_path: Path) -> None:
    """Stored or sent again, by value or by reference, the model reads one conversation."""

    async def story(stage: Stage) -> None:
        async with stage.sdk() as api:
            first = await api.responses.create(model=MODEL, input="weather?", tools=[WEATHER])
            (call,) = [item for item in first.output if item.type == "function_call"]
            output: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
            ask: Any = {"role": "user", "content": "weather?"}
            await api.responses.create(model=MODEL, input=[output], previous_response_id=first.id, tools=[WEATHER])
            kept: Any = [ask, *(item.to_dict() for item in first.output), output]
            await api.responses.create(model=MODEL, input=kept, tools=[WEATHER], store=False)
            referred: Any = [ask, *({"type": "item_reference", "id": item.id} for item in first.output), output]
            await api.responses.create(model=MODEL, input=referred, tools=[WEATHER])
        prompts = {tuple(call.prompt_token_ids) for call in stage.worker.calls[1:]}
        assert len(prompts) == 1

    tell(tmp_path, story, f"<think>hm</think>I look.\n{CALL}", "a", "b", "c")


def test_the_tool_choice_constrains_the_answer(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        choices: list[Any] = [
            "required",
            {"type": "function", "name": "weather"},
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]},
        ]
        async with stage.sdk() as api:
            for choice in choices:
                response = await api.responses.create(model=MODEL, input="?", tools=[WEATHER], tool_choice=choice)
                assert [item.type for item in response.output] == ["function_call"]
                assert stage.worker.calls[-1].params.grammar is not None
            await api.responses.create(model=MODEL, input="?", tools=[WEATHER], tool_choice="none")
        assert "weather" not in stage.worker.last_prompt

    tell(tmp_path, story, *[f"</think>{CALL}"] * 3, "no")


def test_logprobs_are_those_of_the_text(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        async with stage.sdk() as api:
            whole = await api.responses.create(
                model=MODEL, input="hi", include=["message.output_text.logprobs"], top_logprobs=2
            )
            async with api.responses.stream(
                model=MODEL, input="hi", include=["message.output_text.logprobs"], top_logprobs=2
            ) as stream:
                deltas = [event.logprobs async for event in stream if event.type == "response.output_text.delta"]
                streamed = await stream.get_final_response()
        for response in (whole, streamed):
            message: Any = response.output[1]
            logprobs = message.content[0].logprobs
            assert "".join(entry.token for entry in logprobs) == "yes, I do"
            assert [len(entry.top_logprobs) for entry in logprobs] == [2] * 9
        assert "".join(entry.token for entries in deltas for entry in entries) == "yes, I do"

    tell(tmp_path, story, *["<think>hm</think>yes, I do"] * 2)


def test_breakpoints_keep_the_prompt_and_usage_says_so(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        part: Any = {"type": "input_text", "text": "a long story", "prompt_cache_breakpoint": {"mode": "explicit"}}
        async with stage.sdk() as api:
            response = await api.responses.create(
                model=MODEL,
                input=[{"role": "user", "content": [part, {"type": "input_text", "text": "and now?"}]}],
                prompt_cache_options={"ttl": "12h"},
            )
        (pin,) = stage.worker.calls[0].pins
        assert pin.ttl_s == 12 * 3600
        assert stage.worker.last_prompt.index("a long story") < pin.num_tokens
        assert response.usage is not None
        details = response.usage.input_tokens_details
        assert (details.cached_tokens, details.cache_write_tokens) == (0, pin.num_tokens)

    tell(tmp_path, story, "ok")


def test_of_many_breakpoints_the_latest_count(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        parts: Any = [
            {"type": "input_text", "text": f"part {number}", "prompt_cache_breakpoint": {"mode": "explicit"}}
            for number in range(6)
        ]
        async with stage.sdk() as api:
            await api.responses.create(model=MODEL, input=[{"role": "user", "content": parts}])
        ends = [pin.num_tokens for pin in stage.worker.calls[0].pins]
        prompt = stage.worker.last_prompt
        ids = stage.worker.calls[0].prompt_token_ids
        kept = [stage.worker.tokenizer.decode(ids[:end], skip_special_tokens=False) for end in ends]
        assert kept == [prompt.partition(f"part {number}")[0] + f"part {number}" for number in range(2, 6)]

    tell(tmp_path, story, "ok")


def test_tokens_of_the_input_are_counted(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        async with stage.sdk() as api:
            response = await api.responses.create(model=MODEL, input="hi", instructions="be brief", tools=[WEATHER])
            counted = await api.responses.input_tokens.count(
                model=MODEL, input="hi", instructions="be brief", tools=[WEATHER]
            )
            chained = await api.responses.input_tokens.count(input="more", previous_response_id=response.id)
        assert response.usage is not None
        assert counted.input_tokens == response.usage.input_tokens
        assert chained.input_tokens > len("hi hello more")
        assert len(stage.worker.calls) == 1

    tell(tmp_path, story, "hello")
