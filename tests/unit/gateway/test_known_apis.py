"""The next body of a known conversation is read from its last known messages on in all APIs, as if it were whole."""

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest

from tandem.core.errors import InvalidRequestError
from tandem.core.scope import CacheScope
from tandem.gateway.anthropic.dialect import MessagesDialect
from tandem.gateway.dialect import Dialect, DialectContext, ParsedRequest
from tandem.gateway.openai.chat import ChatDialect
from tandem.gateway.openai.responses.dialect import ResponsesDialect
from tandem.gateway.openai.responses.store import EmbeddedResponseStore
from tandem.gateway.parts import CallBegun
from tests.helpers.tokenizers import CHAT_TEMPLATE
from tests.unit.gateway.test_known_conversations import DEMO, context_of, text
from tests.unit.text.turn_templates import CARRIED, LAST_QUESTION, MACROS

TEMPLATES = {"demo": DEMO, "plain": CHAT_TEMPLATE, "last question": LAST_QUESTION, "macros": MACROS, "carried": CARRIED}
WITH_IDS = """\
{%- if tools %}{{- tools | tojson }}{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}{{- '[TOOL_CALLS]f[CALL_ID]' + call.id + '[ARGS]{}' }}{%- endfor %}
{%- endfor %}
"""
Round = dict[str, Any]  # of a conversation, independent of the API


def talk(rng: random.Random) -> list[Round]:
    """Questions, calls with their results, and answers."""
    rounds: list[Round] = []
    for question in range(rng.choice([3, 6])):
        rounds.append({"kind": "question", "text": text(rng)})
        for step in range(rng.choice([0, 1, 3])):
            calls = [f"c{question}-{step}-{number}" for number in range(rng.choice([1, 1, 2]))]
            said, thought = rng.choice(["", text(rng)]), rng.choice([None, text(rng)])
            rounds.append({"kind": "calls", "calls": calls, "text": said, "thought": thought})
            rounds.append({"kind": "results", "calls": calls, "text": text(rng)})
        rounds.append({"kind": "answer", "text": text(rng) or "so", "thought": rng.choice([None, text(rng)])})
    return rounds


def anthropic(rng: random.Random, rounds: list[Round], options: dict[str, Any]) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    for each in rounds:
        blocks: list[dict[str, Any]] = []
        if each.get("thought"):
            blocks.append({"type": "thinking", "thinking": each["thought"], "signature": ""})
        if each["kind"] == "results":
            blocks += [{"type": "tool_result", "tool_use_id": call, "content": each["text"]} for call in each["calls"]]
        elif each["text"]:
            blocks.append({"type": "text", "text": each["text"]})
        if each["kind"] == "calls":
            blocks += [{"type": "tool_use", "id": call, "name": "look", "input": {"a": 1}} for call in each["calls"]]
        messages.append({"role": "user" if each["kind"] in ("question", "results") else "assistant", "content": blocks})
    if options["marks"]:
        for message in messages[-1:-4:-2]:
            message["content"][-1]["cache_control"] = {"type": "ephemeral"}
    body: dict[str, Any] = {"model": "m", "max_tokens": 8, "messages": messages}
    if options["tools"]:
        body["tools"] = [{"name": "look", "input_schema": {"type": "object"}}]
    if options["system"]:
        mark = {"cache_control": {"type": "ephemeral"}} if options["marks"] else {}
        body["system"] = [{"type": "text", "text": options["system"], **mark}]
    if options["keep"]:
        edit = {"type": "clear_thinking_20251015", "keep": options["keep"]}
        body["context_management"] = {"edits": [edit]}
    if rng.random() < 0.05:
        body["messages"].insert(len(messages) // 2, {"role": "user", "content": "twice"})
    return body


def responses(rng: random.Random, rounds: list[Round], options: dict[str, Any]) -> dict[str, Any]:
    items: list[dict[str, Any]] = []
    for each in rounds:
        if each.get("thought"):
            parts = [{"type": "reasoning_text", "text": each["thought"]}]
            items.append({"type": "reasoning", "summary": [], "content": parts})
        if each["kind"] == "results":
            outputs = [
                {"type": "function_call_output", "call_id": call, "output": each["text"]} for call in each["calls"]
            ]
            items += outputs
        elif each["text"]:
            items.append({"role": "user" if each["kind"] == "question" else "assistant", "content": each["text"]})
        if each["kind"] == "calls":
            made = [
                {"type": "function_call", "call_id": call, "name": "look", "arguments": "{}"} for call in each["calls"]
            ]
            items += made
    if options["marks"] and items[-1].get("role") == "user":
        point = {"prompt_cache_breakpoint": {"mode": "explicit"}}
        items[-1]["content"] = [{"type": "input_text", "text": items[-1]["content"], **point}]
    body: dict[str, Any] = {"model": "m", "input": items, "store": rng.random() < 0.05, "max_output_tokens": 16}
    if options["tools"]:
        body["tools"] = [{"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": False}]
    if options["system"]:
        body["instructions"] = options["system"]
    return body


def chat(rng: random.Random, rounds: list[Round], options: dict[str, Any]) -> dict[str, Any]:
    messages: list[dict[str, Any]] = [{"role": "system", "content": options["system"]}] if options["system"] else []
    for each in rounds:
        if each["kind"] == "results":
            messages += [{"role": "tool", "tool_call_id": call, "content": each["text"]} for call in each["calls"]]
            continue
        message = {"role": "user" if each["kind"] == "question" else "assistant", "content": each["text"]}
        if each.get("thought"):
            message["reasoning_content"] = each["thought"]
        if each["kind"] == "calls":
            function = {"name": "look", "arguments": "{}"}
            message["tool_calls"] = [{"id": call, "type": "function", "function": function} for call in each["calls"]]
        messages.append(message)
    if options["marks"]:
        mark = {"cache_control": {"type": "ephemeral"}}
        for message in [*messages[-1:], *messages[:1]]:
            message["content"] = [{"type": "text", "text": message["content"], **mark}]
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    return {"model": "m", "messages": messages, "max_tokens": 8} | ({"tools": tools} if options["tools"] else {})


APIS = {"chat": chat, "messages": anthropic, "responses": responses}


def bodies(rng: random.Random, api: str, *, has_tools: bool) -> list[bytes]:
    """Of one conversation, from its first question to its last, edited here and there."""
    rounds = talk(rng)
    options = {
        "marks": rng.random() < 0.4,
        "tools": has_tools and rng.random() < 0.5,
        "system": rng.choice(["", text(rng)]),
        "keep": rng.choice([None, None, {"type": "all"}, {"type": "thinking_turns", "value": 1}]),
    }
    found = []
    for end in range(1, len(rounds) + 1):
        if rounds[end - 1]["kind"] not in ("question", "results"):
            continue
        if rng.random() < 0.03:
            edited = rng.randrange(end)
            rounds[edited] = {**rounds[edited], "text": text(rng)}
        now = options | ({"tools": has_tools and not options["tools"]} if rng.random() < 0.03 else {})
        found.append(json.dumps(APIS[api](rng, rounds[:end], now), ensure_ascii=False).encode())
    return found


def dialect(api: str, context: DialectContext) -> Dialect:
    if api == "chat":
        return ChatDialect(context)
    return MessagesDialect(context) if api == "messages" else ResponsesDialect(context, EmbeddedResponseStore(), "")


async def read(api: str, context: DialectContext, body: bytes) -> ParsedRequest | str:
    def isolate(scope: CacheScope) -> CacheScope:
        return scope

    try:
        return await dialect(api, context).read(body, "r", isolate)
    except InvalidRequestError as error:
        return f"{type(error).__name__}: {error}"


def told(found: ParsedRequest | str) -> Any:
    """All that a worker is told of the prompt."""
    if isinstance(found, str):
        return found
    request = found.request
    params = [choice.params.grammar for choice in request.choices]
    return request.choices[0].prompt_token_ids.tolist(), request.pins, params


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("num_talks", [4, pytest.param(2_200, marks=pytest.mark.slow)])
def test_equals_the_whole(tmp_path: Path, api: str, name: str, num_talks: int) -> None:
    plain = context_of(tmp_path / "plain", TEMPLATES[name], 0)
    known = [context_of(tmp_path / "known", TEMPLATES[name]), context_of(tmp_path / "few", TEMPLATES[name], 60_000)]
    rng = random.Random(f"{api} {name}")

    async def run() -> int:
        num_unread = 0
        for _ in range(num_talks):
            for body in bodies(rng, api, has_tools=name == "demo"):
                wanted = told(await read(api, plain, body))
                for each in known:
                    found = await read(api, each, body)
                    assert told(found) == wanted
                    if not isinstance(found, str) and found.encoding is not None:
                        num_unread += found.encoding.num_unread_messages
        return num_unread

    assert asyncio.run(run()) > 10 * num_talks
    for each in [plain, *known]:
        each.model.encoder.close()


@pytest.mark.parametrize("api", APIS)
def test_no_call_gets_the_id_of_an_earlier_one(tmp_path: Path, api: str) -> None:
    """The bug: models that write ids repeat those of the conversation. A conversation with two calls of one id could
    not go on in Anthropic's API.
    """
    context, rng, long = context_of(tmp_path, WITH_IDS), random.Random(1), "x" * 1500
    options = {"marks": False, "tools": True, "system": "", "keep": None}
    rounds: list[Round] = [{"kind": "question", "text": long}]
    rounds.append({"kind": "calls", "calls": ["abcdefghi"], "text": "", "thought": None})
    rounds.append({"kind": "results", "calls": ["abcdefghi"], "text": long})
    for _ in range(3):
        rounds += [{"kind": "answer", "text": long}, {"kind": "question", "text": long}]

    async def run() -> int:
        num_unread = 0
        for end in range(3, len(rounds) + 1, 2):
            asked = await read(api, context, json.dumps(APIS[api](rng, rounds[:end], options)).encode())
            assert not isinstance(asked, str), asked
            parts = asked.results[0].parser.feed("[TOOL_CALLS]look[CALL_ID]abcdefghi[ARGS]{}")
            (begun,) = (part for part in parts if isinstance(part, CallBegun))
            assert begun.call_id != "abcdefghi"
            assert asked.encoding is not None
            num_unread += asked.encoding.num_unread_messages
        return num_unread

    assert asyncio.run(run())
    context.model.encoder.close()
