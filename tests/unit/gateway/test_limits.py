"""Schemas are checked at a cost that is small beside reading them."""

import sys
from typing import Any

import pytest

from tandem.gateway.anthropic.breakpoints import BreakpointList
from tandem.gateway.anthropic.fields import MessagesPromptBody
from tandem.gateway.anthropic.tools import read_tools as read_messages_tools
from tandem.gateway.errors import RequestError
from tandem.gateway.limits import MAX_SCHEMA_DEPTH, check_schema
from tandem.gateway.openai.responses.tools import read_tools as read_responses_tools
from tandem.gateway.openai.tools import read_tools as read_chat_tools


def schema(num_values: int) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": {"enum": [0] * num_values}}}


def read_everywhere(parameters: dict[str, Any]) -> None:
    """As a tool of each API."""
    read_chat_tools([{"type": "function", "function": {"name": "f", "parameters": parameters}}], None, None)
    read_responses_tools([{"type": "function", "name": "f", "parameters": parameters}], None, None)
    tool = {"name": "f", "input_schema": parameters}
    read_messages_tools(MessagesPromptBody(model="m", messages=[], tools=[tool]), BreakpointList())


def num_steps(parameters: dict[str, Any]) -> int:
    """Python functions that are called, of the interpreter's own too."""
    num_calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal num_calls
        num_calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        read_everywhere(parameters)
    finally:
        sys.setprofile(before)
    return num_calls


def test_values_without_an_inside_cost_no_step() -> None:
    """A few MiB of numbers held up every stream for seconds: each was asked, in Python, whether it is a mapping."""
    read_everywhere(schema(1))
    assert num_steps(schema(50_000)) == num_steps(schema(1))


@pytest.mark.parametrize("wrap", [lambda value: {"a": value}, lambda value: [1, value, 2]], ids=["objects", "lists"])
def test_to_the_deepest_level(wrap: Any) -> None:
    value: Any = 1
    for _ in range(MAX_SCHEMA_DEPTH - 1):
        value = wrap(value)
    deepest = {"a": value}
    assert check_schema(deepest, "schema") is deepest
    with pytest.raises(RequestError, match="nested more than 32 deep"):
        check_schema({"a": wrap(value)}, "schema")
