"""Reads JSON with exact integers of any size; orjson by itself would read those beyond 64 bits as floats. Pure."""

import re
from typing import Any

import orjson
from pydantic_core import from_json

from tandem.gateway.errors import RequestError

_NUM_DIGITS = 19  # every integer beyond 64 bits has at least as many digits
_IN_TEXT = re.compile(rf"[0-9]{{{_NUM_DIGITS}}}")
_EXACT_FIELDS = frozenset(
    {"messages", "tools", "response_format", "structured_outputs", "text", "output_config", "output_format"}
)
_SAME_DIGITS = bytes.maketrans(b"123456789", b"0" * 9)


def read_exactly(text: str) -> Any:
    """Parses `text`, with exact integers. Raises ValueError where it is not JSON."""
    read = orjson.loads(text)
    return from_json(text) if _IN_TEXT.search(text) else read


def exact_fields(body: bytes, parsed: dict[str, Any]) -> dict[str, Any]:
    """`parsed`, which orjson has read from `body`, with exact integers in its messages and schemas.

    Raises:
        RequestError: it is nested too deep.
    """
    if b"0" * _NUM_DIGITS not in body.translate(_SAME_DIGITS):  # NOTE: ten times as fast as a pattern
        return parsed
    try:
        exact = from_json(body)
    except ValueError as error:
        raise RequestError(f"the body is not valid JSON: {error}", code="invalid_json") from error
    return {name: exact[name] if name in _EXACT_FIELDS else value for name, value in parsed.items()}
