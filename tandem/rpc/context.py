"""Metadata of the call being served, which handlers may read in addition to its message."""

from contextvars import ContextVar

# The W3C `traceparent` of the call being served, or None; each call is served in a context of its own.
incoming_traceparent: ContextVar[str | None] = ContextVar("incoming_traceparent", default=None)
