"""The W3C `traceparent` header as a value, and the current one of this task.

What a client sends is not trusted: anything malformed counts as absent, as the standard asks.
"""

import re
from contextvars import ContextVar
from dataclasses import dataclass

_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", flags=re.ASCII)
_MAX_CHARACTERS = 256

traceparent_var: ContextVar[str | None] = ContextVar("traceparent", default=None)


@dataclass(frozen=True, slots=True)
class TraceParent:
    """Ids of a trace and of the caller's span in it."""

    trace_id: int
    span_id: int
    flags: int

    @classmethod
    def parse(cls, header: str | None) -> "TraceParent | None":
        """Parses a header; None if it is absent or invalid."""
        match = _FORM.fullmatch(header.strip()) if header is not None and len(header) <= _MAX_CHARACTERS else None
        if match is None or match[1] == "ff" or (match[1] == "00" and match[5]):
            return None
        parent = cls(int(match[2], 16), int(match[3], 16), int(match[4], 16))
        return parent if parent.trace_id and parent.span_id else None

    def __str__(self) -> str:
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{self.flags:02x}"
