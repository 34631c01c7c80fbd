"""Calls shown to a model, and to clients, have every digit."""

import json
from pathlib import Path
from typing import Any

import orjson
import pytest

from tandem.gateway.errors import RequestError
from tandem.gateway.exact import exact_fields, read_exactly
from tests.helpers.fake_backend import MODEL
from tests.unit.gateway.anthropic.talking import Scene, play

WEI = 2**70
SCHEMA = {"type": "object", "properties": {"wei": {"type": "integer"}}}
CALL = f'<tool_call>\n{{"name": "pay", "arguments": {{"wei": {WEI}}}}}\n</tool_call>'
USER: dict[str, Any] = {"role": "user", "content": "pay"}


async def chat(scene: Scene) -> None:
    tools = [{"type": "function", "function": {"name": "pay", "parameters": SCHEMA}}]
    asked: dict[str, Any] = {"model": MODEL, "messages": [USER], "tools": tools}
    message = (await scene.client.post("/v1/chat/completions", json=asked)).json()["choices"][0]["message"]
    (call,) = message["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"wei": WEI}
    result = {"role": "tool", "tool_call_id": call["id"], "content": "paid"}
    for arguments in (call["function"]["arguments"], {"wei": WEI}):
        call["function"]["arguments"] = arguments
        await answered(scene, "/v1/chat/completions", asked | {"messages": [USER, message, result]})


async def responses(scene: Scene) -> None:
    tools = [{"type": "function", "name": "pay", "parameters": SCHEMA}]
    asked: dict[str, Any] = {"model": MODEL, "input": [USER], "tools": tools}
    first = (await scene.client.post("/v1/responses", json=asked)).json()
    (call,) = [item for item in first["output"] if item["type"] == "function_call"]
    assert json.loads(call["arguments"]) == {"wei": WEI}
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "paid"}
    await answered(scene, "/v1/responses", asked | {"input": [result], "previous_response_id": first["id"]})
    await answered(scene, "/v1/responses", asked | {"input": [USER, call, result]})


async def messages(scene: Scene) -> None:
    tools = [{"name": "pay", "input_schema": SCHEMA}]
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 2000, "messages": [USER], "tools": tools}
    response = await scene.client.post("/v1/messages", json=asked)
    content = json.loads(response.text)["content"]
    (use,) = [block for block in content if block["type"] == "tool_use"]
    assert use["input"] == {"wei": WEI}
    result = {"type": "tool_result", "tool_use_id": use["id"], "content": "paid"}
    told = [USER, {"role": "assistant", "content": content}, {"role": "user", "content": [result]}]
    await answered(scene, "/v1/messages", asked | {"messages": told})
    counted = {"model": MODEL, "messages": told, "tools": tools}
    num_tokens = (await scene.client.post("/v1/messages/count_tokens", json=counted)).json()["input_tokens"]
    assert num_tokens == len(scene.worker.calls[-1].prompt_token_ids)


async def answered(scene: Scene, path: str, asked: dict[str, Any]) -> None:
    response = await scene.client.post(path, json=asked)
    assert response.status_code == 200, response.text
    assert f'"wei": {WEI}}}' in scene.worker.last_prompt


@pytest.mark.parametrize("dialect", [chat, responses, messages])
def test_a_call_with_a_large_integer_comes_back_to_the_digit(dialect: Any, tmp_path: Path) -> None:
    play(tmp_path, dialect, CALL, "done", "done")


@pytest.mark.parametrize("value", [WEI, -WEI, 2**64, 2**63, -(2**63) - 1, 1.5, 1e300, [{"a": [WEI]}], "é", None])
def test_what_is_read_is_what_was_written(value: Any) -> None:
    read = read_exactly(json.dumps(value))
    assert (read, type(read)) == (value, type(value))
    body = json.dumps({"messages": [{"input": value}]}).encode()
    assert exact_fields(body, orjson.loads(body)) == {"messages": [{"input": value}]}


@pytest.mark.parametrize("text", ["", "{", "NaN", "1e999", '"\\ud800"', "9" * 5000])
def test_what_is_no_json_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        read_exactly(text)


def test_what_is_nested_too_deep_is_refused() -> None:
    body = f'{{"messages": [{{"input": {"[" * 300}{WEI}{"]" * 300}}}]}}'.encode()
    with pytest.raises(RequestError, match="recursion limit"):
        exact_fields(body, orjson.loads(body))


LARGE = {"type": "object", "properties": {"wei": {"enum": [2**64]}}}


def tool(form: str) -> list[dict[str, Any]]:
    function = {"name": "pay", "parameters": LARGE}
    return [{"type": "function", **(function if form == "responses" else {"function": function})}]


SCHEMAS: list[tuple[str, dict[str, Any], str]] = [
    ("chat/completions", {"tools": tool("chat")}, "tools[0].parameters"),
    (
        "chat/completions",
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": LARGE}}},
        "response_format.json_schema.schema",
    ),
    ("completions", {"prompt": "a", "structured_outputs": {"json": LARGE}}, "structured_outputs.json"),
    ("responses", {"input": "a", "tools": tool("responses")}, "tools[0].parameters"),
    (
        "responses",
        {"input": "a", "text": {"format": {"type": "json_schema", "name": "a", "schema": LARGE}}},
        "text.format.schema",
    ),
    ("messages", {"tools": [{"name": "pay", "input_schema": LARGE}]}, "tools.0.input_schema"),
    (
        "messages",
        {"output_config": {"format": {"type": "json_schema", "schema": LARGE}}},
        "output_config.format.schema",
    ),
]


def test_a_schema_with_an_integer_of_more_than_64_bits_is_refused(tmp_path: Path) -> None:
    """It was read as the nearest float, and answers and prompts had that one's digits."""

    async def story(scene: Scene) -> None:
        for path, asked, param in SCHEMAS:
            conversation = {"messages": [USER], "max_tokens": 100} if "messages" in path or "chat" in path else {}
            response = await scene.client.post(f"/v1/{path}", json={"model": MODEL, **conversation, **asked})
            assert response.status_code == 400, response.text
            assert f"{param} holds an integer of more than 64 bits" in response.text

    play(tmp_path, story)
