"""Grammar rules of a family's calls, and the part of a tool's schema that they enforce."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.core.errors import InvalidRequestError
from tandem.core.sampling_params import MAX_GRAMMAR_CHARACTERS
from tandem.gateway.conversation import Tool, ToolChoice, ToolMode
from tandem.gateway.parsing.lark import json_rule, literal
from tandem.text.grammar import enforceable

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}  # schema of a callee whose arguments are not constrained
_NO_ARGUMENTS: Mapping[str, Any] = {"properties": {}, "additionalProperties": False}


@dataclass(frozen=True, slots=True)
class Callee:
    """A tool that may be called.

    Args:
        schema: of its arguments, in the form that llguidance accepts.
        is_strict: the request is refused where a family's calls cannot enforce the schema.
    """

    name: str
    schema: Mapping[str, Any]
    is_strict: bool


@dataclass(frozen=True, slots=True)
class CallRules:
    """Grammar rules of tool calls in Lark, llguidance's grammar language.

    Args:
        openings: marks that calls begin with; "" = none.
        body: the rule for the text after the opening: one call or several.
        rules: definitions that `body` refers to.
        first_character: first character of a call without an opening.
    """

    openings: tuple[str, ...]
    body: str
    rules: str
    first_character: str = ""


def enforced_tools(tools: Sequence[Tool], choice: ToolChoice) -> list[Tool]:
    """Tools whose calls must match their schemas: strict ones, and all where a call is forced."""
    return [tool for tool in _admitted(tools, choice) if tool.strict or choice.mode is ToolMode.REQUIRED]


def callees(tools: Sequence[Tool], choice: ToolChoice, free: Collection[str] = ()) -> list[Callee]:
    """The tools that `choice` admits, with the schemas to enforce.

    Schemas of strict tools are enforced. Other schemas are enforced where a call is forced, as far as that is possible.

    Args:
        free: names of non-strict tools whose schemas are not enforced.

    Raises:
        InvalidRequestError: a strict tool's schema cannot be enforced, or all of them are too long together.
    """
    kept = enforced_tools(tools, choice)
    num_characters = sum(len(json.dumps(tool.parameters, ensure_ascii=False)) for tool in kept)
    if num_characters > MAX_GRAMMAR_CHARACTERS:
        raise InvalidRequestError(
            f"tools has {num_characters} characters of parameters that calls must keep to; at most "
            f"{MAX_GRAMMAR_CHARACTERS} can be enforced, so offer fewer tools"
        )
    is_forced = choice.mode is ToolMode.REQUIRED
    return [
        Callee(tool.name, _schema(tool, is_forced=is_forced and tool.name not in free), tool.strict)
        for tool in _admitted(tools, choice)
    ]


def _admitted(tools: Sequence[Tool], choice: ToolChoice) -> list[Tool]:
    return [tool for tool in tools if not choice.names or tool.name in choice.names]


def _schema(tool: Tool, *, is_forced: bool) -> Mapping[str, Any]:
    schema = {"type": "object", **(tool.parameters or _NO_ARGUMENTS)}
    if tool.strict:
        try:
            return enforceable(schema)
        except InvalidRequestError as error:
            raise InvalidRequestError(f"the parameters of the strict tool {tool.name!r}: {error}") from error
    try:
        return enforceable(_without_text_rules(schema)) if is_forced else ANY_OBJECT
    except InvalidRequestError:
        return ANY_OBJECT


def _without_text_rules(schema: Any) -> Any:
    """The schema without formats and patterns of strings. NOTE: only the compiler knows whether one can be enforced."""
    if isinstance(schema, list):
        return [_without_text_rules(inner) for inner in schema]
    if not isinstance(schema, Mapping):
        return schema
    kept = {
        key: value for key, value in schema.items() if not (key in ("format", "pattern") and isinstance(value, str))
    }
    return {key: value if key in ("const", "enum") else _without_text_rules(value) for key, value in kept.items()}


def json_call(callee: Callee, key: str, index: int) -> str:
    """The rule for a call as a JSON object; its arguments are rule `args_{index}`."""
    head = f'{{"name": {literal(callee.name)}, "{key}": '
    return f'{literal(head)} args_{index} "}}"'


def json_arguments(callees: Sequence[Callee]) -> str:
    """Definitions of the rules `args_{index}`."""
    return "".join(json_rule(f"args_{index}", callee.schema) for index, callee in enumerate(callees))
