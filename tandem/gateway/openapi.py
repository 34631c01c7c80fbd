"""Completes the gateway's OpenAPI document with responses, streams and errors, in the format of each path's API.

The web framework generates the document from the routes; tables here add the rest. A route that is not in the tables
still has its errors described.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from tandem.gateway.openapi_schemas import SCHEMAS, Schema, list_of, object_with, one_of, reference_to

JSON = "application/json"
EVENTS = "text/event-stream"
ANTHROPIC_PATH = "/v1/messages"

_ABOUT = (
    "OpenAI's and Anthropic's APIs over one model. A stream (`stream: true`) is sent as server-sent events; the schema "
    "of `text/event-stream` is that of one event, and the `contentSchema` of its `data` that of the JSON in it."
)
_CODES: Mapping[str, str] = {
    "400": "The request is wrong; the message names the field and what it may hold.",
    "401": "The key is missing or unknown.",
    "402": "The key's budget is spent.",
    "403": "The key may not do this, or a web page of another site may not.",
    "404": "There is no such model, response or path.",
    "408": "The request did not come in time.",
    "409": "It is in a state that does not allow this.",
    "413": "The body is too long, or has too many values.",
    "415": "The body's content type is not JSON.",
    "429": "A limit of the key, or every worker is full; `retry-after` says when to try again.",
    "500": "A bug; the log has it under the request's id.",
    "503": "No worker or router is there.",
    "504": "The request took longer than this server allows.",
    "529": "No worker or router is there.",
}
_SECURITY: Mapping[str, Any] = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "a key made by `tandem keys create`"},
    "x-api-key": {
        "type": "apiKey",
        "in": "header",
        "name": "x-api-key",
        "description": "the same, as Anthropic has it",
    },
}


@dataclass(frozen=True, slots=True)
class SuccessResponse:
    """The successful answer of a path.

    Args:
        about: description of the answer.
        schema: name of its schema in `SCHEMAS`.
        event: name of the schema of each event of a stream; None: it has none.
        stream: description of the stream.
        is_done_said: a stream ends with `[DONE]`.
        also: further media types that can be requested.
    """

    about: str
    schema: str | None = None
    event: str | None = None
    stream: str = ""
    is_done_said: bool = False
    status: str = "200"
    also: tuple[str, ...] = ()


_ANSWERS: Mapping[tuple[str, str], SuccessResponse] = {
    ("post", "/v1/chat/completions"): SuccessResponse(
        "The answer, or its stream.",
        "ChatCompletion",
        "ChatCompletionChunk",
        "Chunks; with `include_usage` the last has usage and no choices; then `data: [DONE]`. A stream that breaks "
        "ends with an event that holds an `error`.",
        is_done_said=True,
    ),
    ("post", "/v1/completions"): SuccessResponse(
        "The continuations, or their stream.",
        "Completion",
        "Completion",
        "Chunks, then `data: [DONE]`. A stream that breaks ends with an event that holds an `error`.",
        is_done_said=True,
    ),
    ("post", "/v1/responses"): SuccessResponse(
        "The response, or its stream.",
        "Response",
        "ResponseEvent",
        "`response.created`, `response.in_progress`, the events of each output item, then `response.completed`, "
        "`response.incomplete` or `response.failed`. Each event has its name in an `event:` line too.",
    ),
    ("post", "/v1/messages"): SuccessResponse(
        "The message, or its stream.",
        "Message",
        "MessageEvent",
        "`message_start`, the start, deltas and stop of each block, `message_delta`, `message_stop`. Each event has "
        "its name in an `event:` line too. A stream that breaks ends with `error`.",
    ),
    ("get", "/v1/responses/{response_id}"): SuccessResponse(
        "The stored response.", "Response", "ResponseEvent", "With `stream=true`: as its stream told it."
    ),
    ("post", "/v1/responses/{response_id}/cancel"): SuccessResponse("The response, stopped.", "Response"),
    ("delete", "/v1/responses/{response_id}"): SuccessResponse("It is forgotten.", "ResponseDeleted"),
    ("get", "/v1/responses/{response_id}/input_items"): SuccessResponse("What the model was shown.", "ResponseItems"),
    ("post", "/v1/responses/input_tokens"): SuccessResponse("How many tokens its prompt has.", "TokenCount"),
    ("post", "/v1/messages/count_tokens"): SuccessResponse("How many tokens the prompt has.", "TokenCount"),
    ("get", "/v1/models"): SuccessResponse("The models, as both SDKs read them.", "ModelList"),
    ("get", "/v1/models/{model_id}"): SuccessResponse("One model.", "Model"),
    ("post", "/tokenize"): SuccessResponse("The token ids.", "Tokens"),
    ("post", "/detokenize"): SuccessResponse("The text.", "Text"),
    ("get", "/tokenizer_info"): SuccessResponse("The tokenizer and chat template.", "TokenizerInfo"),
    ("get", "/health"): SuccessResponse("It lives.", "Status"),
    ("get", "/ping"): SuccessResponse("It lives.", "Alive"),
    ("post", "/ping"): SuccessResponse("It lives.", "Alive"),
    ("get", "/admin/overview"): SuccessResponse("Pools, links and rates.", "Overview"),
    ("get", "/ready"): SuccessResponse("It can serve.", "Ready"),
    ("get", "/version"): SuccessResponse("Its version.", "Version"),
    ("get", "/admin/workers"): SuccessResponse("Every process.", "Workers"),
    ("get", "/admin/decisions"): SuccessResponse("The pairings.", "Decisions"),
    ("post", "/admin/keys"): SuccessResponse("The key, with its secret.", "NewAccountKey", status="201"),
    ("get", "/admin/keys"): SuccessResponse("All keys.", "AccountKeys"),
    ("get", "/admin/keys/{key_id}"): SuccessResponse("The key.", "AccountKey"),
    ("delete", "/admin/keys/{key_id}"): SuccessResponse("It is refused from now on.", "Revoked"),
    ("get", "/admin/usage"): SuccessResponse("Requests, or totals.", "Usage", also=("text/csv",)),
    ("get", "/admin/requests/{request_id}"): SuccessResponse("The request's stages.", "Timeline"),
}

_PARTS = {"anyOf": [{"type": "string"}, list_of(object_with({"type": {"type": "string"}})), {"type": "null"}]}
_CHAT_MESSAGE = object_with(
    {"role": one_of("developer", "system", "user", "assistant", "tool")},
    content=_PARTS,
    tool_calls=list_of({"type": "object"}),
    tool_call_id={"type": "string"},
)
_MESSAGE = object_with({"role": one_of("user", "assistant", "system"), "content": _PARTS})
_MESSAGES: Mapping[str, Schema] = {
    "/v1/chat/completions": _CHAT_MESSAGE,
    "/tokenize": _CHAT_MESSAGE,
    "/v1/messages": _MESSAGE,
    "/v1/messages/count_tokens": _MESSAGE,
}


def document(app: FastAPI) -> None:
    """Makes `app` produce the complete document; call when all routes have been added."""

    def described() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _complete(
                get_openapi(title=app.title, version=app.version, description=_ABOUT, routes=app.routes)
            )
        return app.openapi_schema

    app.openapi = described  # type: ignore[method-assign]


def body_schema(body: type[BaseModel]) -> dict[str, Any]:
    """The `openapi_extra` of a route that reads its body itself."""
    schema = _schema_of(body)
    whole = _inlined({name: value for name, value in schema.items() if name != "$defs"}, schema.get("$defs", {}))
    return {"requestBody": {"required": True, "content": {JSON: {"schema": whole}}}}


@functools.cache
def _schema_of(body: type[BaseModel]) -> Mapping[str, Any]:
    return body.model_json_schema()


def _inlined(value: Any, definitions: Mapping[str, Any]) -> Any:
    """Replaces references by their definitions. NOTE: none of our bodies is recursive."""
    if isinstance(value, list):
        return [_inlined(item, definitions) for item in value]
    if not isinstance(value, dict):
        return value
    if isinstance(name := value.get("$ref"), str):
        rest = {key: item for key, item in value.items() if key != "$ref"}
        return _inlined(definitions[name.rpartition("/")[2]], definitions) | rest
    return {key: _inlined(item, definitions) for key, item in value.items()}


def _complete(found: dict[str, Any]) -> dict[str, Any]:
    for path, item in found["paths"].items():
        for method, operation in item.items():
            operation["responses"] = _responses(method, path, operation["responses"])
            operation["security"] = [{}, *({name: []} for name in _SECURITY)]
            _describe_messages(path, operation)
    components = found.setdefault("components", {})
    schemas = components.setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    schemas |= SCHEMAS
    components["securitySchemes"] = dict(_SECURITY)
    return found


def _responses(method: str, path: str, told: Mapping[str, Any]) -> dict[str, Any]:
    """The responses of a route: its own description or the table's, then the errors."""
    good = {code: value for code, value in told.items() if code.startswith("2")}
    answer = _ANSWERS.get((method, path.replace(":path", "")))
    if answer is not None:
        good = {answer.status: {"description": answer.about, "content": _content(answer, _error_of(path))}}
    elif path == "/metrics":
        good = {"200": {"description": "Prometheus text.", "content": {"text/plain": {"schema": {"type": "string"}}}}}
    return good | _errors(path)


def _content(answer: SuccessResponse, error: str) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if answer.schema is not None:
        content[JSON] = {"schema": reference_to(answer.schema)}
    if answer.event is not None:
        content[EVENTS] = {"schema": _event(answer, error)}
    return content | {media: {"schema": {"type": "string"}} for media in answer.also}


def _event(answer: SuccessResponse, error: str) -> Schema:
    """One event of a stream. NOTE: OpenAPI 3.1 has the schema of an event stream stand for each of its events."""
    assert answer.event is not None
    json = {"contentMediaType": JSON, "contentSchema": {"anyOf": [reference_to(answer.event), reference_to(error)]}}
    data: Schema = {"type": "string", "anyOf": [{"enum": ["[DONE]"]}, json] if answer.is_done_said else [json]}
    return object_with({"data": data}, event={"type": "string"}) | {"description": answer.stream}


def _error_of(path: str) -> str:
    is_anthropic = path == ANTHROPIC_PATH or path.startswith(f"{ANTHROPIC_PATH}/")
    return "AnthropicError" if is_anthropic else "OpenAIError"


def _errors(path: str) -> dict[str, Any]:
    error = _error_of(path)
    left_out = "503" if error == "AnthropicError" else "529"
    return {
        code: {"description": about, "content": {JSON: {"schema": reference_to(error)}}}
        for code, about in _CODES.items()
        if code != left_out
    }


def _describe_messages(path: str, operation: dict[str, Any]) -> None:
    """Adds the shape of messages, which bodies declare as plain objects because they are parsed later."""
    if (message := _MESSAGES.get(path)) is None or "requestBody" not in operation:
        return
    messages = operation["requestBody"]["content"][JSON]["schema"]["properties"]["messages"]
    for variant in (messages, *messages.get("anyOf", ())):
        if variant.get("type") == "array":
            variant["items"] = message
