"""Limits on cache breakpoints, and their lifetimes as clients of both APIs write them. Pure.

A cache breakpoint is a place in a prompt; the client pays for the KV of the prompt up to it to stay cached.
`marked_conversation` finds these places in the rendered prompt.
"""

from typing import Any

from tandem.core.errors import shown
from tandem.gateway.errors import RequestError

MAX_BREAKPOINTS = 4  # in one request
LIFETIMES_S = {"5m": 300.0, "30m": 1800.0, "1h": 3600.0, "12h": 43200.0}  # accepted values and their seconds
SHORT_S = LIFETIMES_S["5m"]  # longer lifetimes are billed as one hour


def lifetime_s(value: Any, where: str) -> float:
    """The lifetime in seconds. Raises RequestError naming the accepted values."""
    if not isinstance(value, str) or value not in LIFETIMES_S:
        raise RequestError(f"{where}.ttl={shown(value)} must be one of {', '.join(LIFETIMES_S)}", param=where)
    return LIFETIMES_S[value]
