"""Ids for tool calls, in the form that clients and templates expect. Unguessable, so that no two answers share one."""

import secrets
import string
from collections.abc import Callable, Iterator

_ALPHABET = string.ascii_letters + string.digits


def call_ids(prefix: str, length: int, draw: Callable[[str], str] = secrets.choice) -> Iterator[str]:
    """Endless ids: `prefix` and `length` letters or digits. `draw`: chooses a character of a text."""
    while True:
        yield prefix + "".join(draw(_ALPHABET) for _ in range(length))
