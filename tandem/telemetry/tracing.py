"""Spans of this process, sent to an OpenTelemetry collector; without one, trace ids are only passed through.

Invariant: traced code never waits for the collector and never fails because of it: spans queue in bounded memory and
are dropped if it is unreachable. There is no global tracer: several independent ones can exist in one process.
"""

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from tandem.core.errors import ConfigurationError, shown, without_password
from tandem.core.timeline import Stage
from tandem.telemetry.traceparent import TraceParent, traceparent_var

if TYPE_CHECKING:
    from opentelemetry import trace
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SpanExporter

Attribute = str | int | float | bool | Sequence[str]

_EXPORT_TIMEOUT_S = 2.0
_EXPORT_DELAY_MS = 1000.0
_NS_PER_S = 1_000_000_000


class Span:
    """Span of one piece of work, from entering to leaving the context.

    `traceparent`: header for calls made on its behalf; None without tracing. An exception that leaves the context marks
    it as failed; a cancellation is recorded, but not as an error.
    """

    def __init__(self, traceparent: str | None, span: "trace.Span | None" = None) -> None:
        self.traceparent = traceparent
        self._span = span
        self._former: str | None = None

    def set(self, attributes: Mapping[str, Attribute]) -> None:
        """Add attributes."""
        if self._span is not None:
            self._span.set_attributes(attributes)

    def fail(self, error: BaseException) -> None:
        """Mark the span as failed by an error that was handled inside."""
        if self._span is not None:
            self._mark(error)

    def __enter__(self) -> "Span":
        self._former = traceparent_var.get()
        traceparent_var.set(self.traceparent)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        traceparent_var.set(self._former)  # NOTE: no token: an async generator may be closed in another context
        if self._span is None:
            return
        if isinstance(error, Exception):
            self._mark(error)
        elif kind is not None:
            self._span.set_attribute("tandem.cancelled", True)
        self._span.end()

    def _mark(self, error: BaseException) -> None:
        from opentelemetry.trace import Status, StatusCode

        assert self._span is not None
        self._span.set_attribute("error.type", type(error).__name__)
        self._span.set_status(Status(StatusCode.ERROR, str(error)))


class Tracing:
    """Creates the spans of one process. Build it by `configure`."""

    def __init__(self, process: str, provider: "TracerProvider | None") -> None:
        self._process = process
        self._provider = provider
        self._tracer = None if provider is None else provider.get_tracer("tandem")

    @classmethod
    def configure(cls, process: str, endpoint: str | None, exporter: "SpanExporter | None" = None) -> "Tracing":
        """Creates the tracing of one process.

        Args:
            process: `gateway`, `router` or a worker's id; becomes `service.instance.id`.
            endpoint: of an OTLP collector over HTTP, as http://127.0.0.1:4318; None only passes trace ids through.
            exporter: takes the spans instead of a collector.

        Raises:
            ConfigurationError: the endpoint is no HTTP address.
        """
        if endpoint is None and exporter is None:
            return cls(process, None)
        return cls(process, _provider(process, exporter or _otlp_exporter(endpoint or "")))

    def span(
        self, name: str, traceparent: str | None = None, attributes: Mapping[str, Attribute] | None = None
    ) -> Span:
        """A span to be entered with `with`, also around awaits.

        Args:
            traceparent: its caller's; None = of the span this task is in; malformed = it starts a trace.
        """
        header = traceparent_var.get() if traceparent is None else traceparent
        parent = TraceParent.parse(header)
        if self._tracer is None:
            return Span(None if parent is None else str(parent))
        span = self._tracer.start_span(name, context=_context(parent), attributes=dict(attributes or {}))
        context = span.get_span_context()
        return Span(str(TraceParent(context.trace_id, context.span_id, int(context.trace_flags))), span)

    def export_stages(self, timeline: Sequence[Stage], parent: str | None) -> None:
        """Turn a request's stages, measured by any process, into children of the span `parent`."""
        if self._tracer is None:
            return
        context = _context(TraceParent.parse(parent))
        for stage in timeline:
            attributes: dict[str, Attribute] = {f"tandem.{name}": value for name, value in stage.attributes.items()}
            span = self._tracer.start_span(
                stage.name,
                context=context,
                attributes=attributes | {"tandem.process": stage.process},
                start_time=int(stage.start_s * _NS_PER_S),
            )
            span.end(end_time=int((stage.start_s + max(0.0, stage.duration_s)) * _NS_PER_S))

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Headers by which a call made in this task continues its trace."""
        header = traceparent_var.get()
        return () if header is None else (("traceparent", header),)

    def flush(self, timeout_s: float = _EXPORT_TIMEOUT_S) -> None:
        """Send what is queued. Blocks: not for an event loop."""
        if self._provider is not None:
            self._provider.force_flush(int(timeout_s * 1000))

    def close(self) -> None:
        """Send what is queued, if the collector takes it within a few seconds, and end the sender. Blocks."""
        if self._provider is not None:
            self._provider.shutdown()


def _provider(process: str, exporter: "SpanExporter") -> "TracerProvider":
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create({"service.name": "tandem", "service.instance.id": process})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=_EXPORT_DELAY_MS))
    return provider


def _otlp_exporter(endpoint: str) -> "SpanExporter":
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(endpoint=_traces_url(endpoint), timeout=_EXPORT_TIMEOUT_S)


def _traces_url(endpoint: str) -> str:
    """A collector's base address gets the standard path; one that has a path is taken as it is."""
    try:
        parts = urlsplit(endpoint)
        is_usable = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:
        is_usable = False
    if not is_usable:
        raise ConfigurationError(
            f"otlp_endpoint={shown(without_password(endpoint))} is no HTTP address of a collector; "
            "use one as http://127.0.0.1:4318"
        )
    return endpoint if parts.path.strip("/") else endpoint.rstrip("/") + "/v1/traces"


def _context(parent: TraceParent | None) -> "Context":
    from opentelemetry.context import Context
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

    if parent is None:
        return Context()
    span_context = SpanContext(parent.trace_id, parent.span_id, is_remote=True, trace_flags=TraceFlags(parent.flags))
    return set_span_in_context(NonRecordingSpan(span_context), Context())
