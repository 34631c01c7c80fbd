"""JSON whose integers have any number of digits: orjson reads those beyond 64 bits as floats. Pure."""

from typing import Any

import orjson
from pydantic_core import from_json

from tandem.gateway.errors import RequestError

_BEYOND_64_BITS = 2.0**63


def read_exactly(text: str) -> Any:
    """What `text` says, to the digit. Raises ValueError where it is not JSON."""
    read = orjson.loads(text)
    return from_json(text) if _may_be_rounded(read) else read


def exact_messages(body: bytes, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The `messages` of `body`, which orjson has read, to the digit.

    Raises:
        RequestError: it is nested too deep.
    """
    if not _may_be_rounded(messages):
        return messages
    try:
        found: list[dict[str, Any]] = from_json(body)["messages"]
    except ValueError as error:
        raise RequestError(f"the body is not valid JSON: {error}", code="invalid_json") from error
    return found


def _may_be_rounded(value: Any) -> bool:
    rest = [value]
    while rest:
        value = rest.pop()
        if isinstance(value, float) and abs(value) >= _BEYOND_64_BITS:
            return True
        if isinstance(value, dict):
            rest.extend(value.values())
        elif isinstance(value, list):
            rest.extend(value)
    return False
