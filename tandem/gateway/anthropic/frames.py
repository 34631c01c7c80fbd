"""Formats server-sent events and error bodies of Anthropic's API. Pure.

Every event has its name twice, in its `event:` line and in its data, because clients drop events without the line.
"""

from collections.abc import Mapping
from typing import Any

import orjson

from tandem.gateway.errors import Problem

OVERLOADED = 529  # what Anthropic says where others say 503
_KINDS = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def frame(value: Mapping[str, Any]) -> bytes:
    """One server-sent event, named by the value's `type`."""
    return f"event: {value['type']}\n".encode() + b"data: " + orjson.dumps(value) + b"\n\n"


PING = frame({"type": "ping"})


def status_of(problem: Problem) -> int:
    """HTTP status of a problem in this API."""
    return OVERLOADED if problem.status == 503 else problem.status


def error_value(problem: Problem) -> dict[str, Any]:
    """The error object of this API."""
    kind = _KINDS.get(problem.status, "invalid_request_error" if problem.status < 500 else "api_error")
    error: dict[str, Any] = {"type": kind, "message": problem.message}
    if problem.code == "thread_unsupported_request":
        error["details"] = {"error_code": problem.code}  # NOTE: the SDK's tool runner goes on without threads
    return {"type": "error", "error": error}


def error_body(problem: Problem, request_id: str) -> bytes:
    """Body of an answer that is an error, as JSON."""
    return orjson.dumps({**error_value(problem), "request_id": request_id})
