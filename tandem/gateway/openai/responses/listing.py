"""Pagination of a response's input items. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from tandem.core.errors import shown
from tandem.gateway.errors import RequestError


def listed(items: Sequence[Mapping[str, Any]], after: str | None, limit: int, *, is_ascending: bool) -> dict[str, Any]:
    """One page: `limit` items behind the one with the id `after`, in the given order.

    Raises:
        RequestError: there is none of this id.
    """
    ordered = items if is_ascending else items[::-1]
    start = 0
    if after is not None:
        place = next((index for index, item in enumerate(ordered) if item["id"] == after), None)
        if place is None:
            raise RequestError(f"after={shown(after)} is not the id of an item of this response", param="after")
        start = place + 1
    page = ordered[start : start + limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else "",
        "last_id": page[-1]["id"] if page else "",
        "has_more": start + limit < len(ordered),
    }
