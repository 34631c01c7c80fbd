"""Validates the tools and the tool choice that a dialect has read: names, descriptions, type of parameters. Pure.

Sizes of schemas and the number of tools are checked before, while they are read (`limits`).
"""

from collections.abc import Sequence

from tandem.core.errors import shown
from tandem.gateway.conversation import Tool, ToolChoice, ToolMode
from tandem.gateway.errors import RequestError
from tandem.gateway.limits import check_tool_name

MAX_DESCRIPTION_CHARACTERS = 32 * 1024  # of one tool


def check_tools(tools: Sequence[Tool], choice: ToolChoice) -> None:
    """Raises RequestError naming the first invalid tool, or the choice if it wants a tool that is not given."""
    names: set[str] = set()
    for index, tool in enumerate(tools):
        _check_tool(tool, names, f"tools[{index}]")
        names.add(tool.name)
    unknown = [name for name in choice.names if name not in names]
    if unknown:
        raise _refusal(f"tool_choice names {shown(unknown[0])}, which is not among the tools", "tool_choice")
    if choice.mode is ToolMode.REQUIRED and not tools:
        raise _refusal("tool_choice asks for a call, but there are no tools", "tool_choice")


def _check_tool(tool: Tool, names: set[str], where: str) -> None:
    check_tool_name(tool.name, f"{where}.name")
    if tool.name in names:
        raise _refusal(f"{where}.name={shown(tool.name)} is the name of another tool too", where)
    kind = tool.parameters.get("type", "object")
    if kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise _refusal(
            f"{where}.parameters.type={shown(kind)} must be 'object': the arguments of a call are an object's members",
            where,
        )
    if tool.description is not None and len(tool.description) > MAX_DESCRIPTION_CHARACTERS:
        raise _refusal(
            f"{where}.description has {len(tool.description)} characters; at most {MAX_DESCRIPTION_CHARACTERS}", where
        )


def _refusal(message: str, where: str) -> RequestError:
    return RequestError(message, param=where)
