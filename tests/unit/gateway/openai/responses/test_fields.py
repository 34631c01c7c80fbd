"""Bodies that are refused by name, values that ask for nothing, and the table that says of each field which it is."""

import re
from pathlib import Path
from typing import Any

from tandem.gateway.openai.responses import fields
from tandem.gateway.openai.responses.items import _FIELDS as ITEM_FIELDS
from tests.helpers.fake_backend import SAYS_JSON
from tests.helpers.fake_worker import MODEL
from tests.helpers.tokenizers import CHAT_TEMPLATE
from tests.unit.gateway.openai.responses.stage import Stage, frames_of, tell

ASKED: dict[str, Any] = {"model": MODEL, "input": "hi"}
TOOL: dict[str, Any] = {"type": "function", "name": "f", "parameters": {"type": "object"}}
TEXT: dict[str, Any] = {"type": "input_text", "text": "x"}
JSON: dict[str, Any] = {"type": "json_schema", "name": "x", "schema": {"type": "object"}}
DOCUMENT = (Path(__file__).parents[5] / "docs" / "api-responses.md").read_text()


def allowed(tool: dict[str, Any]) -> dict[str, Any]:
    return {"type": "allowed_tools", "mode": "auto", "tools": [tool]}


def chat_choice(tool: dict[str, Any]) -> dict[str, Any]:
    """As chat completions write it."""
    inner = {"type": "function", "function": {"name": tool["name"]}}
    return {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [inner]}}


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"input": None}, "input", "input is missing"),
    ({"input": 3}, "input", "input=3"),
    ({"input": []}, "input", "input is empty"),
    ({"input": [{"role": "user", "content": "x"}] * 11}, "input", "at most 10"),
    ({"instructions": 3}, "instructions", "instructions=3"),
    ({"previous_response_id": "resp_1"}, "previous_response_id", "was not found"),
    ({"tools": [{"type": "web_search"}]}, "tools", "'web_search'"),
    ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools", "'mcp'"),
    ({"tools": [{"type": "custom", "name": "x"}]}, "tools", "'custom'"),
    ({"tools": [TOOL | {"defer_loading": True}]}, "tools", "defer_loading"),
    ({"tools": [TOOL, TOOL]}, "tools", "'f'"),
    ({"tools": [TOOL], "tool_choice": {"type": "file_search"}}, "tool_choice", "file_search"),
    ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice", "'g'"),
    ({"tools": [TOOL], "top_logprobs": 2}, "top_logprobs", "may call tools"),
    ({"tools": [TOOL], "include": ["message.output_text.logprobs"]}, "include", "may call tools"),
    ({"tools": [TOOL], "tool_choice": chat_choice(TOOL)}, "tool_choice", "a mode, auto or required, and tools"),
    ({"tools": [TOOL], "tool_choice": allowed({"function": {"name": "f"}})}, "tool_choice", "must name a function"),
    ({"tools": [TOOL], "tool_choice": allowed({"type": "mcp", "name": "f"})}, "tool_choice", "'mcp'"),
    ({"tools": [TOOL], "tool_choice": allowed(TOOL) | {"mode": "none"}}, "tool_choice", "'none'"),
    ({"tool_choice": "required"}, "tool_choice", "no tools"),
    ({"reasoning": {"effort": "enormous"}}, "reasoning", "enormous"),
    ({"reasoning": {"mode": "pro"}}, "reasoning", "'pro'"),
    ({"reasoning": {"x": 1}}, "reasoning", "reasoning.x=1"),
    ({"text": {"verbosity": "low"}}, "text", "'low'"),
    ({"text": {"format": {"type": "xml"}}}, "text", "'xml'"),
    ({"text": {"format": {"type": ["text"]}}}, "text", "['text']"),
    ({"text": {"format": {"type": "text", "name": "x"}}}, "text", "text.format.name='x'"),
    ({"text": {"format": {"type": "json_object", "schema": {}}}}, "text", "text.format.schema={}"),
    ({"text": {"format": JSON | {"json_schema": {}}}}, "text", "text.format.json_schema={}"),
    ({"text": {"format": JSON | {"description": [[]]}}}, "text", "text.format.description=[[]]"),
    ({"text": {"format": JSON | {"strict": 1}}}, "text", "text.format.strict=1"),
    ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text", "schema=None"),
    ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text", "name=None"),
    ({"truncation": "sometimes"}, "truncation", "'sometimes'"),
    ({"prompt_cache_options": {"ttl": "2h"}}, "prompt_cache_options", "'2h'"),
    ({"prompt_cache_options": {"prewarm": True}}, "prompt_cache_options", "prewarm"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "messages"),
    ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens=0"),
    ({"top_logprobs": 21}, "top_logprobs", "top_logprobs=21"),
    ({"include": ["everything"]}, "include", "'everything'"),
    ({"metadata": {"a": 1}}, "metadata", "metadata"),
    ({"metadata": {str(number): "" for number in range(17)}}, "metadata", "metadata"),
    ({"metadata": {"a" * 65: ""}}, "metadata", "metadata"),
    ({"metadata": {"a": "x" * 513}}, "metadata", "metadata"),
    ({"user": "x" * 257}, "user", "at most 256 characters"),
    ({"user": "x" * 15_000_000}, "user", "at most 256 characters"),
    ({"safety_identifier": "x" * 257}, "safety_identifier", "at most 256 characters"),
    ({"temperature": -1.0}, "temperature", "temperature=-1.0"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream=true"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options", "stream_options.x=1"),
    ({"conversation": "conv_1"}, "conversation", "conversation="),
    ({"prompt": {"id": "x"}}, "prompt", "prompt="),
    ({"moderation": {"model": "x"}}, "moderation", "moderation="),
    ({"context_management": [{"type": "compaction"}]}, "context_management", "context_management="),
    ({"background_options": {"completion_window": "8h"}}, "background_options", "8h"),
    ({"max_tokens": 3}, "max_tokens", "send max_output_tokens"),
    ({"response_format": {"type": "text"}}, "response_format", "send text.format"),
    ({"n": 2}, "n", "one answer"),
    ({"prompt_logprobs": 1}, "prompt_logprobs", "/v1/completions"),
    ({"return_token_ids": True}, "return_token_ids", "/v1/completions"),
    ({"messages": []}, "messages", "messages=[]"),
    ({"unheard_of": 1}, "unheard_of", "unheard_of=1"),
    (
        {"input": [{"role": "user", "content": [{**TEXT, "prompt_cache_breakpoint": {"mode": [[]]}}]}]},
        "input",
        "prompt_cache_breakpoint",
    ),
]
HARMLESS: dict[str, Any] = {
    "include": ["reasoning.encrypted_content"],
    "reasoning": {"summary": "auto", "effort": None},
    "text": {"format": {"type": "text"}, "verbosity": "medium"},
    "truncation": "auto",
    "service_tier": "auto",
    "safety_identifier": "x",
    "max_tool_calls": 3,
    "prompt_cache_retention": "24h",
    "context_management": [],
    "background": False,
    "background_options": {"completion_window": "soonest"},
    "n": 1,
    "return_token_ids": False,
    "metadata": {},
    "tools": [],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "conversation": None,
    "unheard_of": None,
}
CODEX: dict[str, Any] = {  # what Codex sends at its second turn, for a model that it is told thinks
    "model": MODEL,
    "instructions": "You are Codex.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Sandboxed."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "ls"}]},
        {"type": "reasoning", "summary": [], "content": None, "encrypted_content": None},
        {"type": "function_call", "name": "shell", "arguments": '{"command":["ls"]}', "call_id": "call_1"},
        {"type": "function_call_output", "call_id": "call_1", "output": "a\nb"},
    ],
    "tools": [{"type": "function", "name": "shell", "strict": False, "parameters": {"type": "object"}}],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199",
    "text": {"verbosity": "medium"},
    "service_tier": "priority",
    "client_metadata": {"x-codex-installation-id": "11111111-1111-1111-1111-111111111111"},
}


def test_what_cannot_be_honoured_is_refused_by_name(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        for body, param, message in WRONG:
            got = await stage.client.post("/v1/responses", json={**ASKED, **body})
            assert got.status_code == 400, body
            error = got.json()["error"]
            assert message in error["message"], body
            assert re.split(r"[.\[]", error["param"])[0] == param, body
        for raw in (b"", b"{", b"[]", b'"background"', b"\xff"):
            got = await stage.client.post("/v1/responses", content=raw, headers=SAYS_JSON)
            assert (got.status_code, got.json()["error"]["code"]) == (400, "invalid_json")
        unknown = await stage.client.post("/v1/responses", json=ASKED | {"model": "gpt"})
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
        assert not stage.worker.calls

    tell(tmp_path, story, max_messages=10)


def test_what_asks_for_nothing_is_taken(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        got = await stage.client.post("/v1/responses", json=ASKED | HARMLESS)
        assert got.status_code == 200, got.text

    tell(tmp_path, story, "hello")


def test_codex_is_answered(tmp_path: Path) -> None:
    """It sends metadata of its own with every request, all of which were refused."""

    async def story(stage: Stage) -> None:
        got = await stage.client.post("/v1/responses", json=CODEX)
        assert got.status_code == 200, got.text
        assert frames_of(got.text)[-1]["type"] == "response.completed"
        assert "x-codex" not in stage.worker.last_prompt + got.text

    tell(tmp_path, story, "hello")


def test_what_was_not_checked_is_not_repeated(tmp_path: Path) -> None:
    """Objects nested too deep to be written were."""

    async def story(stage: Stage) -> None:
        deep: Any = []
        for _ in range(300):
            deep = [deep]
        choice = {"type": "function", "name": "f", "x": deep}
        got = await stage.client.post("/v1/responses", json={**ASKED, "tools": [TOOL], "tool_choice": choice})
        assert got.status_code == 200, got.text
        assert "x" not in got.json()["tool_choice"]
        text = {"format": {"type": "json_object", "x": deep}}
        got = await stage.client.post("/v1/responses", json={**ASKED, "text": text})
        assert got.status_code == 400
        assert "text.format.x=" in got.json()["error"]["message"]

    tell(tmp_path, story, "hello")


def test_a_model_that_does_not_think_or_call_is_not_asked_to(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        effort = await stage.client.post("/v1/responses", json=ASKED | {"reasoning": {"effort": "high"}})
        assert (effort.status_code, effort.json()["error"]["param"]) == (400, "reasoning.effort")
        tools = await stage.client.post("/v1/responses", json=ASKED | {"tools": [TOOL]})
        assert (tools.status_code, tools.json()["error"]["param"]) == (400, "tools")

    tell(tmp_path, story, template=CHAT_TEMPLATE)


def test_input_that_does_not_fit_is_refused_and_never_cut(tmp_path: Path) -> None:
    async def story(stage: Stage) -> None:
        for truncation in ("auto", "disabled"):
            got = await stage.client.post("/v1/responses", json=ASKED | {"input": "a" * 5000, "truncation": truncation})
            assert (got.status_code, got.json()["error"]["code"]) == (400, "context_length_exceeded")

    tell(tmp_path, story)


def test_every_field_is_in_the_document() -> None:
    names = {
        *fields.ResponsesBody.model_fields,
        *fields.InputTokensBody.model_fields,
        *fields.ReasoningOptions.model_fields,
        *fields.TextOptions.model_fields,
        *fields.HARMLESS,
        *fields.HARMLESS_VALUES,
        *fields.ELSEWHERE,
        *ITEM_FIELDS,
    }
    assert names - set(re.findall(r"`([a-z_]+)[`:]", DOCUMENT)) == set()
    assert set(re.findall(r"`([a-z_.]+)`", DOCUMENT)) >= fields.INCLUDABLE
