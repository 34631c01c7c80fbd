"""Translates the tools, tool choice and `text.format` of the Responses API. Pure.

This API flattens the nested objects of chat completions; they are nested again and read by the rules of chat.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from tandem.core.errors import shown
from tandem.gateway.conversation import FormatKind, OutputFormat, Tool, ToolChoice
from tandem.gateway.errors import RequestError
from tandem.gateway.limits import check_schema
from tandem.gateway.openai import tools as chat

_FORMAT_FIELDS = {
    "text": ("type",),
    "json_object": ("type",),
    "json_schema": ("type", "name", "description", "schema", "strict"),
}


def read_tools(
    tools: Sequence[Mapping[str, Any]] | None, choice: Any, is_parallel: bool | None
) -> tuple[tuple[Tool, ...], ToolChoice]:
    """The tools and the constraint on calls.

    Raises:
        RequestError: naming the part that is not supported, such as a built-in tool.
    """
    nested = [_nested(tool, f"tools[{index}]") for index, tool in enumerate(tools or ())]
    return chat.read_tools(nested, _nested_choice(choice), is_parallel)


def echoed_tools(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    """The tools as a response repeats them."""
    return [
        {
            "type": "function",
            "name": tool["name"],
            "description": tool.get("description"),
            "parameters": tool.get("parameters") or {},
            "strict": bool(tool.get("strict")),
        }
        for tool in tools or ()
    ]


def echoed_choice(choice: Any) -> Any:
    """The tool choice as a response repeats it."""
    if not isinstance(choice, Mapping):
        return choice or "auto"
    if choice["type"] == "function":
        return {"type": "function", "name": choice["name"]}
    tools = [{"type": "function", "name": tool["name"]} for tool in choice["tools"]]
    return {"type": "allowed_tools", "mode": choice["mode"], "tools": tools}


def read_format(text_format: Mapping[str, Any] | None, structured_outputs: Any) -> OutputFormat | None:
    """The format that the answer must match; only one of the two fields may set it.

    Raises:
        RequestError: naming what cannot be honoured.
    """
    output_format = None if text_format is None else _text_format(text_format)
    other = chat.read_format(None, structured_outputs)
    if output_format is not None and other is not None:
        raise RequestError(
            "text.format and structured_outputs both say what to match; send one", param="structured_outputs"
        )
    return output_format or other


def _nested(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise RequestError(
            f"{where}.type={shown(tool.get('type'))} is not supported: this server has no built-in tools and calls "
            "functions only",
            param="tools",
            code="unsupported_parameter",
        )
    chat.refuse_unknown(tool, ("type", *chat.FUNCTION_FIELDS), where)
    return {"type": "function", "function": {name: tool[name] for name in chat.FUNCTION_FIELDS if name in tool}}


def _nested_choice(choice: Any) -> Any:
    """The tool choice in the form of chat completions; values not understood are passed on, to be refused there."""
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    if kind == "function":
        return _named(choice)
    if kind == "allowed_tools":
        if not isinstance(choice.get("tools"), list):
            raise RequestError(
                f"tool_choice={shown(choice)} must have a mode, auto or required, and tools", param="tool_choice"
            )
        tools = [_named(tool) for tool in choice["tools"]]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": tools}}
    return choice


def _named(function: Any) -> dict[str, Any]:
    is_function = isinstance(function, Mapping) and function.get("type") == "function"
    if not is_function or not isinstance(function.get("name"), str):
        raise RequestError(
            f'tool_choice={shown(function)} must name a function: {{"type": "function", "name": "…"}}',
            param="tool_choice",
        )
    return {"type": "function", "function": {"name": function["name"]}}


def _text_format(given: Mapping[str, Any]) -> OutputFormat | None:
    kind = given.get("type")
    if not isinstance(kind, str) or kind not in _FORMAT_FIELDS:
        raise RequestError(
            f"text.format.type={shown(kind)} must be one of {', '.join(_FORMAT_FIELDS)}", param="text.format"
        )
    chat.refuse_unknown(given, _FORMAT_FIELDS[kind], "text.format")
    if kind != "json_schema":
        return OutputFormat(FormatKind.JSON_OBJECT) if kind == "json_object" else None
    if not isinstance(given.get("name"), str):
        raise RequestError(f"text.format.name={shown(given.get('name'))} must be text", param="text.format")
    if not isinstance(given.get("description"), str | None):
        raise RequestError(f"text.format.description={shown(given['description'])} must be text", param="text.format")
    if not isinstance(given.get("strict"), bool | None):
        raise RequestError(f"text.format.strict={shown(given['strict'])} must be true or false", param="text.format")
    check_schema(given.get("schema"), "text.format.schema")
    return OutputFormat(FormatKind.JSON_SCHEMA, given["schema"], "text.format.schema")
