"""Ids of responses and items. Invariant: they cannot be guessed, and an item's id contains that of its response."""

import re
import secrets

_RESPONSE = re.compile(r"resp_[0-9a-f]{48}")
_ITEM = re.compile(r"[a-z]+_([0-9a-f]{48})_i?[0-9]{1,9}")


def new_response_id() -> str:
    """A random id of a response."""
    return f"resp_{secrets.token_hex(24)}"


def is_response_id(text: str) -> bool:
    """Whether a text has the form of such ids."""
    return _RESPONSE.fullmatch(text) is not None


def output_item_id(prefix: str, response_id: str, index: int) -> str:
    """The id of a response's output item number `index`."""
    return f"{prefix}_{response_id.removeprefix('resp_')}_{index}"


def input_item_id(prefix: str, response_id: str, index: int) -> str:
    """The id of an item that was sent with the request of a response."""
    return f"{prefix}_{response_id.removeprefix('resp_')}_i{index}"


def response_of(item_id: str) -> str | None:
    """The response that an item belongs to, if its id is one of ours; else None."""
    found = _ITEM.fullmatch(item_id)
    return None if found is None else f"resp_{found.group(1)}"
