"""Errors of requests that no dialect answers, in the format of the API that the path belongs to. Pure."""

from tandem.gateway.anthropic import frames as anthropic
from tandem.gateway.errors import Problem
from tandem.gateway.openai import frames as openai

_ANTHROPIC_PATH = "/v1/messages"


def refusal_of(problem: Problem, path: str, request_id: str) -> tuple[int, bytes]:
    """The HTTP status and body of the error."""
    if path == _ANTHROPIC_PATH or path.startswith(f"{_ANTHROPIC_PATH}/"):
        return anthropic.status_of(problem), anthropic.error_body(problem, request_id)
    return problem.status, openai.error_body(problem)
