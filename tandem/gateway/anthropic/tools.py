"""Translates the tools, `tool_choice` and output format of Anthropic's bodies.

Invariant: tools that the provider itself would run, such as web search, are refused.
"""

from collections.abc import Mapping
from typing import Any

from tandem.core.errors import shown
from tandem.gateway.anthropic.breakpoints import BreakpointList, read_ttl_s
from tandem.gateway.anthropic.fields import MessagesPromptBody, refuse_unknown, unsupported
from tandem.gateway.conversation import Breakpoint, FormatKind, OutputFormat, Tool, ToolChoice, ToolMode
from tandem.gateway.errors import RequestError
from tandem.gateway.limits import check_num_tools, check_schema
from tandem.gateway.tools_check import check_tools

# NOTE: eager_input_streaming is harmless: arguments are always streamed as they come.
_TOOL = frozenset(
    {
        "type",
        "name",
        "description",
        "input_schema",
        "strict",
        "cache_control",
        "input_examples",
        "allowed_callers",
        "defer_loading",
        "eager_input_streaming",
    }
)
_MODES: Mapping[str, ToolMode] = {
    "auto": ToolMode.AUTO,
    "any": ToolMode.REQUIRED,
    "tool": ToolMode.REQUIRED,
    "none": ToolMode.NONE,
}


def read_tools(body: MessagesPromptBody, points: BreakpointList) -> tuple[tuple[Tool, ...], ToolChoice]:
    """The tools and the constraint on calls; breakpoints of the tools are added to `points`.

    Raises:
        RequestError: naming what cannot be honoured.
    """
    tools = body.tools or []
    check_num_tools(len(tools))
    read = tuple(_tool(tool, f"tools.{index}") for index, tool in enumerate(tools))
    choice = _choice(body.tool_choice or {"type": "auto"})
    check_tools(read, choice)
    for index, tool in enumerate(tools):
        ttl_s = read_ttl_s(tool.get("cache_control"), f"tools.{index}")
        if ttl_s is not None:
            points.add(Breakpoint(ttl_s, tool=index), f"tools.{index}")
    return read, choice


def read_format(body: MessagesPromptBody) -> OutputFormat | None:
    """The format that the answer must match, from the newer field or the older one.

    Raises:
        RequestError: naming what cannot be honoured.
    """
    config = body.output_config or {}
    refuse_unknown(config, frozenset({"effort", "format"}), "output_config")
    given = config.get("format")
    if given is not None and body.output_format is not None:
        raise RequestError("output_format is the older name of output_config.format; send one", param="output_format")
    where = "output_config.format" if body.output_format is None else "output_format"
    given = body.output_format if given is None else given
    if given is None:
        return None
    if not isinstance(given, Mapping) or given.get("type") != "json_schema":
        raise RequestError(f'{where}={shown(given)} must be {{"type": "json_schema", "schema": …}}', param=where)
    refuse_unknown(given, frozenset({"type", "schema"}), where)
    check_schema(given.get("schema"), f"{where}.schema")
    return OutputFormat(FormatKind.JSON_SCHEMA, given["schema"], f"{where}.schema")


def _choice(choice: Mapping[str, Any]) -> ToolChoice:
    kind, is_alone = choice.get("type"), choice.get("disable_parallel_tool_use")
    if not isinstance(kind, str) or kind not in _MODES:
        raise RequestError(f"tool_choice.type={shown(kind)} must be one of {', '.join(_MODES)}", param="tool_choice")
    known = {"type", "disable_parallel_tool_use"} | ({"name"} if kind == "tool" else set())
    refuse_unknown(choice, frozenset(known), "tool_choice")
    if is_alone is not None and not isinstance(is_alone, bool):
        raise RequestError(
            f"tool_choice.disable_parallel_tool_use={shown(is_alone)} must be true or false", param="tool_choice"
        )
    if kind == "tool" and not isinstance(choice.get("name"), str):
        raise RequestError(f"tool_choice.name={shown(choice.get('name'))} must name a tool", param="tool_choice")
    return ToolChoice(_MODES[kind], (choice["name"],) if kind == "tool" else (), is_parallel=not is_alone)


def _tool(tool: Mapping[str, Any], where: str) -> Tool:
    if tool.get("type") not in (None, "custom"):
        raise RequestError(
            f"{where} is of type {shown(tool['type'])}: this server runs no tools of its own; describe it with name, "
            "description and input_schema, and run it yourself",
            param=where,
        )
    refuse_unknown(tool, _TOOL, where)
    description, strict = tool.get("description"), tool.get("strict")
    if description is not None and not isinstance(description, str):
        raise RequestError(f"{where}.description={shown(description)} must be text", param=where)
    if strict is not None and not isinstance(strict, bool):
        raise RequestError(f"{where}.strict={shown(strict)} must be true or false", param=where)
    if tool.get("defer_loading"):
        raise unsupported(f"{where}.defer_loading", tool["defer_loading"])
    if tool.get("allowed_callers") not in (None, ["direct"]):
        raise unsupported(f"{where}.allowed_callers", tool["allowed_callers"])
    parameters = _parameters(tool, where)
    return Tool(name=tool.get("name", ""), description=description, parameters=parameters, strict=bool(strict))


def _parameters(tool: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """The input's schema. Examples of inputs are moved into it, where templates show them."""
    schema, examples = tool.get("input_schema"), tool.get("input_examples")
    if examples and (not isinstance(examples, list) or not all(isinstance(example, dict) for example in examples)):
        raise RequestError(f"{where}.input_examples={shown(examples)} must be a list of objects", param=where)
    if examples and isinstance(schema, dict):
        schema = {**schema, "examples": examples}
    checked = check_schema(schema, f"{where}.input_schema")
    if checked.get("type", "object") != "object":
        raise RequestError(f"{where}.input_schema.type={shown(checked['type'])} must be 'object'", param=where)
    return checked
