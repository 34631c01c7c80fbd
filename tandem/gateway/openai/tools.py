"""Translates OpenAI's `tools`, `tool_choice` and `response_format`. Pure."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from tandem.core.errors import shown
from tandem.gateway.conversation import FormatKind, OutputFormat, Tool, ToolChoice, ToolMode
from tandem.gateway.errors import RequestError
from tandem.gateway.limits import check_num_tools, check_schema
from tandem.gateway.tools_check import check_tools

MAX_FORMAT_CHARACTERS = 64 * 1024  # of a regex or grammar, or of all texts of a choice
MAX_TEXTS_TO_CHOOSE = 1024  # of one choice
_HARMLESS_VALUES: tuple[Any, ...] = (None, False, ["direct"])  # ask for nothing, under whatever name
_SAYS_WHAT = frozenset({"type", "$ref", "anyOf", "oneOf", "allOf", "enum", "const"})
_FORMAT_FIELDS = {"text": ("type",), "json_object": ("type", "schema"), "json_schema": ("type", "json_schema")}
FUNCTION_FIELDS = ("name", "description", "parameters", "strict")
_STRUCTURES = {
    "json": FormatKind.JSON_SCHEMA,
    "regex": FormatKind.REGEX,
    "choice": FormatKind.CHOICE,
    "grammar": FormatKind.GRAMMAR,
    "json_object": FormatKind.JSON_OBJECT,
}


def read_tools(
    tools: Sequence[Mapping[str, Any]] | None, choice: Any, is_parallel: bool | None
) -> tuple[tuple[Tool, ...], ToolChoice]:
    """The tools and the constraint on calls.

    Raises:
        RequestError: naming what cannot be honoured.
    """
    check_num_tools(len(tools or ()))
    read = tuple(_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools or ()))
    mode, names = _choice(choice)
    wanted = ToolChoice(mode, names, is_parallel is not False)
    check_tools(read, wanted)
    return read, wanted


def read_format(response_format: Any, structured_outputs: Any) -> OutputFormat | None:
    """The format that the answer must match; only one of the two fields may set it.

    Raises:
        RequestError: naming what cannot be honoured.
    """
    first = None if response_format is None else _response_format(response_format)
    second = None if structured_outputs is None else _structured(structured_outputs)
    if first is not None and second is not None:
        raise _refusal("response_format and structured_outputs both say what to match; send one", "structured_outputs")
    return first or second


def refuse_unknown(found: Mapping[str, Any], known: Collection[str], where: str) -> None:
    """Raises RequestError for the first member that is not among `known`, unless its value has no effect."""
    for name, value in found.items():
        if name not in known and value not in _HARMLESS_VALUES:
            raise _refusal(
                f"{where}.{shown(name)[1:-1]}={shown(value)} is not supported by this server; leave it out, {where} "
                f"takes {', '.join(known)}",
                where,
            )


def _tool(tool: Mapping[str, Any], where: str) -> Tool:
    if tool.get("type") != "function":
        raise _refusal(f"{where}.type={shown(tool.get('type'))}: this server calls functions only", where)
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise _refusal(f"{where}.function={shown(function)} must be an object", where)
    refuse_unknown(tool, ("type", "function", "cache_control"), where)  # NOTE: the last marks a place, for speed
    refuse_unknown(function, FUNCTION_FIELDS, f"{where}.function")
    description, strict = function.get("description"), function.get("strict")
    if description is not None and not isinstance(description, str):
        raise _refusal(f"{where}.function.description={shown(description)} must be text", where)
    if strict is not None and not isinstance(strict, bool):
        raise _refusal(f"{where}.function.strict={shown(strict)} must be true or false", where)
    parameters = {} if function.get("parameters") is None else function["parameters"]
    return Tool(
        name=function.get("name", ""),
        description=description,
        parameters=check_schema(parameters, f"{where}.parameters"),
        strict=bool(strict),
    )


def _choice(choice: Any) -> tuple[ToolMode, tuple[str, ...]]:
    if choice is None:
        return ToolMode.AUTO, ()
    if isinstance(choice, str) and choice in tuple(ToolMode):
        return ToolMode(choice), ()
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        return ToolMode.REQUIRED, (_function_name(choice, "tool_choice"),)
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        return _allowed(choice.get("allowed_tools"))
    raise _refusal(
        f"tool_choice={shown(choice)} must be none, auto, required, a function or allowed_tools", "tool_choice"
    )


def _allowed(allowed: Any) -> tuple[ToolMode, tuple[str, ...]]:
    tools = allowed.get("tools") if isinstance(allowed, Mapping) else None
    if not isinstance(tools, list) or not tools or allowed.get("mode") not in ("auto", "required"):
        raise _refusal(
            f"tool_choice.allowed_tools={shown(allowed)} must have a mode, auto or required, and tools", "tool_choice"
        )
    return ToolMode(allowed["mode"]), tuple(_function_name(tool, "tool_choice.allowed_tools") for tool in tools)


def _function_name(value: Any, where: str) -> str:
    function = value.get("function") if isinstance(value, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise _refusal(f"{where}={shown(value)} must name a function", "tool_choice")
    return name


def _response_format(given: Any) -> OutputFormat | None:
    """NOTE: clients of several other servers send a json_object with a schema where they mean a json_schema."""
    kind = given.get("type") if isinstance(given, Mapping) else None
    if not isinstance(kind, str) or kind not in _FORMAT_FIELDS:
        raise _refusal(f"response_format={shown(given)} must be of type {', '.join(_FORMAT_FIELDS)}", "response_format")
    refuse_unknown(given, _FORMAT_FIELDS[kind], "response_format")
    if kind == "text":
        return None
    if kind == "json_object":
        schema, where = given.get("schema"), "response_format.schema"
    else:
        described, where = given.get("json_schema"), "response_format.json_schema"
        if not isinstance(described, Mapping) or described.get("schema") is None:
            raise _refusal(f"{where}={shown(described)} must have a schema", "response_format")
        refuse_unknown(described, ("name", "description", "schema", "strict"), where)
        schema, where = described["schema"], f"{where}.schema"
    if schema is None:
        return OutputFormat(FormatKind.JSON_OBJECT)
    checked = check_schema(schema, where)
    if kind == "json_object" and not _SAYS_WHAT.intersection(checked):
        checked = {"type": "object", **checked}
    return OutputFormat(FormatKind.JSON_SCHEMA, checked, where)


def _structured(given: Any) -> OutputFormat:
    """vLLM's form of an output format: exactly one of json, regex, choice, grammar and json_object."""
    structures: dict[str, Any] = {}
    if isinstance(given, Mapping):  # NOTE: vLLM's own class writes out every option it has
        structures = {name: value for name, value in given.items() if value is not None and value is not False}
    if len(structures) != 1 or not structures.keys() <= _STRUCTURES.keys():
        raise _refusal(
            f"structured_outputs={shown(given)} must have exactly one of {', '.join(_STRUCTURES)}", "structured_outputs"
        )
    ((name, value),) = structures.items()
    kind = _STRUCTURES[name]
    _check_structure(kind, value, f"structured_outputs.{name}")
    return OutputFormat(kind, value, f"structured_outputs.{name}")


def _check_structure(kind: FormatKind, value: Any, where: str) -> None:
    if kind is FormatKind.JSON_SCHEMA:
        check_schema(value, where)
    elif kind is FormatKind.JSON_OBJECT:
        if value is not True:
            raise _refusal(f"{where}={shown(value)} must be true", where)
    elif kind is FormatKind.CHOICE:
        if not isinstance(value, list) or not all(isinstance(text, str) and text for text in value) or not value:
            raise _refusal(f"{where}={shown(value)} must be a list of texts", where)
        if len(value) > MAX_TEXTS_TO_CHOOSE or sum(map(len, value)) > MAX_FORMAT_CHARACTERS:
            raise _refusal(
                f"{where} may have {MAX_TEXTS_TO_CHOOSE} texts, {MAX_FORMAT_CHARACTERS} characters in all", where
            )
    elif not isinstance(value, str) or not 0 < len(value) <= MAX_FORMAT_CHARACTERS:
        raise _refusal(f"{where}={shown(value)} must be text of 1 to {MAX_FORMAT_CHARACTERS} characters", where)


def _refusal(message: str, where: str) -> RequestError:
    return RequestError(message, param=where)
