"""A tool call's arguments as the `input` of a tool_use block, which is an object whatever the model wrote.

Arguments that do not begin as a JSON object, such as those of a Python call that was cut off, become the object
`{"arguments": text}`. Clients of a stream parse its pieces as they come and fail at what is no JSON.
"""

import json
import re

import orjson
from pydantic_core import from_json

_OBJECT = re.compile(r'[ \t\r\n]*\{[ \t\r\n]*["}]')
_MAY_BE_OBJECT = re.compile(r"[ \t\r\n]*(\{[ \t\r\n]*)?")


def whole_input(arguments: str) -> orjson.Fragment:
    """The object of a whole answer; arguments that were cut off are parsed as far as they go.

    NOTE: orjson itself writes no integers of more than 64 bits.
    """
    try:
        read = from_json(arguments.strip() or "{}", allow_partial=True)
        text = json.dumps(read if isinstance(read, dict) else {"arguments": arguments}, allow_nan=False)
    except ValueError:
        text = json.dumps({"arguments": arguments})
    return orjson.Fragment(text)


class InputStream:
    """The object of one call, written while its arguments come."""

    def __init__(self) -> None:
        self._held = ""  # of which it is not known yet whether it begins an object
        self._is_begun = False
        self._is_wrapped = False

    def add(self, text: str) -> str:
        """The JSON that a piece of the arguments adds."""
        if self._is_begun:
            return _escaped(text) if self._is_wrapped else text
        text, self._held = self._held + text, ""
        if _MAY_BE_OBJECT.fullmatch(text):
            self._held = text
            return ""
        self._is_begun = True
        self._is_wrapped = _OBJECT.match(text) is None
        return f'{{"arguments": "{_escaped(text)}' if self._is_wrapped else text.lstrip()

    def end(self) -> str:
        """The JSON that ends the object."""
        return '"}' if self._is_wrapped else self._held.strip()


def _escaped(text: str) -> str:
    return json.dumps(text)[1:-1]
