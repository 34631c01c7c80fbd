"""The OpenAPI document against a served gateway: schemathesis finds no 5xx and nothing that is not as described."""

import asyncio
import contextlib
import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.helpers.fake_backend import MODEL, FakeCluster, running_cluster, tell

NUM_EXAMPLES = 8
TIMEOUT_S = 20
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5}
TEXT = {"type": "string", "pattern": "^[a-z ]{1,20}$"}
TAME: dict[str, Any] = {
    "model": {"const": MODEL},
    "messages": {
        "type": "array",
        "items": {
            "type": "object",
            "properties": {"role": {"const": "user"}, "content": TEXT},
            "required": ["role", "content"],
            "additionalProperties": False,
        },
        "minItems": 1,
        "maxItems": 3,
    },
    "input": TEXT,
    "instructions": TEXT,
    "prompt": TEXT,
    "tokens": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 255}},
    "max_tokens": {"type": "integer", "minimum": 1, "maximum": 32},
    "max_output_tokens": {"type": "integer", "minimum": 16, "maximum": 32},
    "temperature": {"type": "number", "minimum": 0, "maximum": 2},
    "seed": {"type": "integer", "minimum": 0, "maximum": 1000},
    "stream": {"type": "boolean"},
    "n": {"type": "integer", "minimum": 1, "maximum": 3},
    "ignore_eos": {"type": "boolean"},
    "return_token_strs": {"type": "boolean"},
}
TAME_ANTHROPIC: dict[str, Any] = {"temperature": {"type": "number", "minimum": 0, "maximum": 1}}
STREAMS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT | {"stream_options": {"include_usage": True}, "n": 2},
    "/v1/completions": {"model": MODEL, "prompt": "abc", "max_tokens": 5, "logprobs": 1},
    "/v1/messages": CHAT,
    "/v1/responses": {"model": MODEL, "input": "Hello", "max_output_tokens": 16},
}


def test_every_path_answers_as_described(tmp_path: Path) -> None:
    async def run() -> dict[str, set[int]]:
        async with (
            running_cluster(tmp_path, router_timeout_s=10.0) as cluster,
            httpx.AsyncClient(base_url=cluster.url) as client,
        ):
            described = (await client.get("/openapi.json")).json()
            return await asyncio.to_thread(drive, described, cluster.url)

    seen = asyncio.run(run())
    for path in (*STREAMS, "/v1/messages/count_tokens", "/v1/responses/input_tokens", "/tokenize", "/detokenize"):
        assert {200, 400} <= seen[f"POST {path}"], f"{path} was only answered with {seen[f'POST {path}']}"


def drive(described: dict[str, Any], url: str) -> dict[str, set[int]]:
    """Ask every operation for what the document allows, for what is sure to be right, and for what is wrong."""
    seen: dict[str, set[int]] = {}
    positive, negative = schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE
    for document, mode in ((described, positive), (described, negative), (tamed(described), positive)):
        for result in schemathesis.openapi.from_dict(document).get_all_operations():
            operation: Any = result.ok()  # type: ignore[union-attr]
            statuses = seen.setdefault(f"{operation.method.upper()} {operation.path}", set())
            with contextlib.suppress(Unsatisfiable):  # nothing can be wrong with an operation that takes nothing
                ask(operation.as_strategy(generation_mode=mode), url, statuses)
    assert all(seen.values()), "an operation was never asked"
    return seen


def ask(strategy: Any, url: str, statuses: set[int]) -> None:
    @given(case=strategy)
    @settings(
        max_examples=NUM_EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def once(case: Any) -> None:
        response = case.call(base_url=url, timeout=TIMEOUT_S)
        statuses.add(response.status_code)
        case.validate_response(response, checks=CHECKS)

    once()


def tamed(described: dict[str, Any]) -> dict[str, Any]:
    """The document with bodies of few fields, whose values cannot be wrong."""
    narrow = copy.deepcopy(described)
    narrow["paths"] = {path: item for path, item in narrow["paths"].items() if "requestBody" in item.get("post", {})}
    for path, item in narrow["paths"].items():
        for operation in item.values():
            for content in operation.get("requestBody", {}).get("content", {}).values():
                schema = content["schema"]
                known = {name: TAME[name] for name in schema.get("properties", {}) if name in TAME}
                known |= TAME_ANTHROPIC if path.startswith("/v1/messages") and "messages" in known else {}
                required = [name for name in known if name in (*schema.get("required", ()), "messages", "input")]
                content["schema"] = {
                    "type": "object",
                    "properties": known,
                    "required": required,
                    "additionalProperties": False,
                }
    return narrow


def test_the_document_is_whole(tmp_path: Path) -> None:
    """Every path says what success and errors look like; every reference leads somewhere; bodies are described."""

    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        described = (await client.get("/openapi.json")).json()
        schemas = described["components"]["schemas"]
        for name in references(described):
            assert name.removeprefix("#/components/schemas/") in schemas
        for path, item in described["paths"].items():
            error = "AnthropicError" if path.startswith("/v1/messages") else "OpenAIError"
            for method, operation in item.items():
                responses = operation["responses"]
                assert "422" not in responses
                assert responses["400"]["content"]["application/json"]["schema"]["$ref"].endswith(error)
                good = [code for code in responses if code.startswith("2")]
                assert good, f"{method} {path} has no success"
                for content in (content for code in good for content in responses[code]["content"].values()):
                    assert content["schema"], f"{method} {path} does not say what success is"
                if method == "post" and path not in ("/ping", "/v1/responses/{response_id}/cancel"):
                    assert operation["requestBody"]["content"]["application/json"]["schema"], path

    tell(tmp_path, story)


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for name, item in value.items():
            if name == "$ref":
                yield item
            else:
                yield from references(item)
    elif isinstance(value, list):
        for item in value:
            yield from references(item)


@pytest.mark.parametrize("path", STREAMS)
def test_each_event_of_a_stream_is_as_described(tmp_path: Path, path: str) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        described = (await client.get("/openapi.json")).json()
        stream = described["paths"][path]["post"]["responses"]["200"]["content"]["text/event-stream"]
        (of_json,) = (way for way in stream["schema"]["properties"]["data"]["anyOf"] if "contentSchema" in way)
        wanted, _ = of_json["contentSchema"]["anyOf"]
        validator = jsonschema_rs.Draft202012Validator({**wanted, "components": described["components"]})
        answer = await client.post(path, json=STREAMS[path] | {"stream": True})
        assert answer.status_code == 200, answer.text
        lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
        events = [json.loads(line) for line in lines if line != "[DONE]"]
        assert events
        for event in events:
            validator.validate(event)
        for wrong in ({}, {"object": "nothing"}, {"type": 1}):
            assert not validator.is_valid(wrong)

    tell(tmp_path, story)


@pytest.mark.parametrize("path", STREAMS)
def test_a_whole_answer_is_as_described(tmp_path: Path, path: str) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        described = (await client.get("/openapi.json")).json()
        content = described["paths"][path]["post"]["responses"]["200"]["content"]["application/json"]
        body = {name: value for name, value in STREAMS[path].items() if name != "stream_options"}
        answer = await client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        jsonschema_rs.Draft202012Validator({**content["schema"], "components": described["components"]}).validate(
            answer.json()
        )

    tell(tmp_path, story)
