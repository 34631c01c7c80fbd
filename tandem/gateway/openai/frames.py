"""Formats server-sent events and error bodies of OpenAI's API. Pure."""

from collections.abc import Mapping
from typing import Any

import orjson

from tandem.gateway.errors import Problem

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"  # a comment, which clients skip


def frame(value: Mapping[str, Any]) -> bytes:
    """One server-sent event without a name."""
    return b"data: " + orjson.dumps(value) + b"\n\n"


def error_value(problem: Problem) -> Mapping[str, Any]:
    """The error object of this API."""
    return {
        "error": {
            "message": problem.message,
            "type": problem.error_type,
            "param": problem.param,
            "code": problem.code,
        }
    }


def error_body(problem: Problem) -> bytes:
    """Body of an answer that is an error, as JSON."""
    return orjson.dumps(error_value(problem))


def error_frames(problem: Problem) -> bytes:
    """The end of a stream that failed: clients raise on the first event and stop reading at the second."""
    return frame(error_value(problem)) + DONE
