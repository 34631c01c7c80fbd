"""Metadata that a call carries beside its message, as handlers may read it."""

from contextvars import ContextVar

# The W3C `traceparent` of the call being served, or None; each call is served in a context of its own.
incoming_traceparent: ContextVar[str | None] = ContextVar("incoming_traceparent", default=None)
