"""Limits on tools, schemas and free-form objects of a request, the same in every dialect. Pure.

Invariant: accepted values are small and flat enough for a template and a grammar; others are refused, naming their
place in the request.
"""

import re
from collections.abc import Mapping
from typing import Any

import orjson

from tandem.core.errors import shown
from tandem.gateway.errors import RequestError

MAX_TOOLS = 128  # of one request
MAX_SCHEMA_BYTES = 256 * 1024  # of one schema as JSON
MAX_SCHEMA_DEPTH = 32  # nested objects and lists
MAX_SCHEMA_VALUES = 65_536  # JSON values in one schema
MAX_FREE_VALUES = 4096  # JSON values in one free-form object
MAX_FREE_DEPTH = 32
_TOOL_NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}")


def check_num_tools(num_tools: int) -> None:
    """Raises RequestError for too many tools."""
    if num_tools > MAX_TOOLS:
        raise RequestError(f"tools has {num_tools} entries; at most {MAX_TOOLS} are taken", param="tools")


def check_tool_name(name: Any, where: str) -> str:
    """Returns `name` if it is a valid tool name; raises RequestError."""
    if not isinstance(name, str) or not _TOOL_NAME.fullmatch(name):
        raise RequestError(f"{where}={shown(name)} must be 1 to 128 letters, digits, _ or -", param=where)
    return name


def check_schema(schema: Any, where: str) -> Mapping[str, Any]:
    """Returns `schema` if it is a JSON object within our limits, with integers of at most 64 bits.

    Raises:
        RequestError: naming the limit.
    """
    if not isinstance(schema, dict):
        raise RequestError(f"{where}={shown(schema)} must be a JSON schema, which is an object", param=where)
    _check_size(schema, where, MAX_SCHEMA_VALUES, MAX_SCHEMA_DEPTH)
    try:
        num_bytes = len(orjson.dumps(schema))
    except TypeError as error:
        raise RequestError(
            f"{where} holds an integer of more than 64 bits, which cannot be kept exactly; leave it out, or take text "
            "of a pattern instead",
            param=where,
        ) from error
    if num_bytes > MAX_SCHEMA_BYTES:
        raise RequestError(f"{where} has {num_bytes} bytes; at most {MAX_SCHEMA_BYTES} are taken", param=where)
    return schema


def check_free_form(given: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Returns `given`, a free-form object, if it is within our limits; raises RequestError naming the limit."""
    _check_size(given, where, MAX_FREE_VALUES, MAX_FREE_DEPTH)
    return given


def _check_size(value: Any, where: str, max_values: int, max_depth: int) -> None:
    """Counts values and depth level by level, so that no nesting is too deep to be counted.

    NOTE: nearly all values are no containers, and a schema may have very many of them; those cost one test in C each.
    """
    level: list[Any] = [value]
    num_values = 0
    for _ in range(max_depth):
        inner = [each.values() if isinstance(each, dict) else each for each in level]
        num_values += sum(map(len, inner))
        if num_values > max_values:
            raise RequestError(f"{where} has more than {max_values} values; at most that many are taken", param=where)
        level = [item for items in inner for item in items if isinstance(item, (dict, list))]
    if level:
        raise RequestError(f"{where} is nested more than {max_depth} deep; flatten it", param=where)
