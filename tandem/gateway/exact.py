"""JSON whose integers have any number of digits: orjson reads those beyond 64 bits as floats. Pure."""

import re
from typing import Any

import orjson
from pydantic_core import from_json

from tandem.gateway.errors import RequestError

_MANY_DIGITS = r"[0-9]{19}"  # of every integer beyond 64 bits, and of little else
_IN_TEXT, _IN_BYTES = re.compile(_MANY_DIGITS), re.compile(_MANY_DIGITS.encode())


def read_exactly(text: str) -> Any:
    """What `text` says, to the digit. Raises ValueError where it is not JSON."""
    read = orjson.loads(text)
    return from_json(text) if _IN_TEXT.search(text) else read


def exact_messages(body: bytes, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The `messages` of `body`, which orjson has read, to the digit.

    Raises:
        RequestError: it is nested too deep.
    """
    if _IN_BYTES.search(body) is None:
        return messages
    try:
        found: list[dict[str, Any]] = from_json(body)["messages"]
    except ValueError as error:
        raise RequestError(f"the body is not valid JSON: {error}", code="invalid_json") from error
    return found
