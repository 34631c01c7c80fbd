"""Reads `cache_control` of Anthropic's bodies as cache breakpoints: places up to which the prompt's KV stays cached.

Invariant: at most four breakpoints, and those of an hour come before those of five minutes. They are added, and
checked, in the order tools, system, messages.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tandem.core.errors import shown
from tandem.gateway.cache_lifetimes import LIFETIMES_S, MAX_BREAKPOINTS
from tandem.gateway.conversation import Breakpoint
from tandem.gateway.errors import RequestError

_TTLS = ("5m", "1h")
_KNOWN = frozenset({"type", "ttl", "scope"})  # NOTE: the scope is whom a provider shares with; here always the tenant


def read_ttl_s(value: Any, where: str) -> float | None:
    """Lifetime of a `cache_control` in seconds, or None where there is none. Raises RequestError when it is wrong."""
    if value is None:
        return None
    if isinstance(value, Mapping) and value.get("type") == "ephemeral" and value.keys() <= _KNOWN:
        ttl = value.get("ttl") or "5m"
        if ttl in _TTLS:
            return LIFETIMES_S[ttl]
    raise RequestError(
        f'{where}.cache_control={shown(value)} must be {{"type": "ephemeral", "ttl": "5m" or "1h"}}', param=where
    )


class BreakpointList:
    """The breakpoints read so far, in order."""

    def __init__(self) -> None:
        self._points: list[Breakpoint] = []

    @property
    def points(self) -> tuple[Breakpoint, ...]:
        return tuple(self._points)

    def add(self, point: Breakpoint, where: str) -> None:
        """Adds a breakpoint. Raises RequestError if it is one too many or lives longer than an earlier one."""
        if len(self._points) == MAX_BREAKPOINTS:
            raise RequestError(
                f"cache_control is set on more than {MAX_BREAKPOINTS} blocks; {where} is one too many", param=where
            )
        if self._points and point.ttl_s > self._points[-1].ttl_s:
            raise RequestError(
                f"{where}.cache_control has a ttl of 1h after one of 5m; longer ones come first", param=where
            )
        self._points.append(point)

    def add_last(self, point: Breakpoint) -> None:
        """Adds the breakpoint of the request's own `cache_control`, at the end; does nothing if the same one exists.
        Raises RequestError as `add`, or if one with another lifetime is at that place.
        """
        same = [known for known in self._points if replace(known, ttl_s=point.ttl_s) == point]
        if not same:
            self.add(point, "cache_control")
        elif same[-1].ttl_s != point.ttl_s:
            raise RequestError(
                "cache_control and that of the last block have different ttls; send one of them", param="cache_control"
            )
