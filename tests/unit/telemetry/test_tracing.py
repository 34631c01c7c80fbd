import asyncio
import http.server
import socket
import threading
import time
from collections.abc import Iterator
from queue import Queue

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tandem.core.errors import ConfigurationError
from tandem.core.sampling_params import SamplingParams
from tandem.core.timeline import Stage
from tandem.telemetry.gen_ai import request_attributes, response_attributes
from tandem.telemetry.traceparent import TraceParent, traceparent_var
from tandem.telemetry.tracing import Tracing

TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
INCOMING = f"00-{TRACE_ID}-{SPAN_ID}-01"


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracing(exporter: InMemorySpanExporter) -> Iterator[Tracing]:
    made = Tracing.configure("decode-0", None, exporter)
    yield made
    made.close()


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "garbage",
        f"00-{'0' * 32}-{SPAN_ID}-01",
        f"00-{TRACE_ID}-{'0' * 16}-01",
        f"ff-{TRACE_ID}-{SPAN_ID}-01",
        f"00-{TRACE_ID}-{SPAN_ID}-01-more",
        f"00-{TRACE_ID.upper()}-{SPAN_ID}-01",
        INCOMING + "x" * 1000,
    ],
)
def test_a_header_that_cannot_be_used_counts_as_absent(header: str | None) -> None:
    assert TraceParent.parse(header) is None


def test_a_later_version_is_read_as_far_as_it_is_known() -> None:
    assert str(TraceParent.parse(f"01-{TRACE_ID}-{SPAN_ID}-01-more")) == INCOMING


def test_without_a_collector_the_trace_is_passed_through() -> None:
    tracing = Tracing.configure("gateway", None)
    with tracing.span("request", INCOMING, {"a": 1}) as span:
        span.set({"b": 2})
        assert span.traceparent == INCOMING
        assert tracing.metadata() == (("traceparent", INCOMING),)
        with tracing.span("child") as child:
            assert child.traceparent == INCOMING
    assert tracing.metadata() == ()
    with tracing.span("request") as span:
        assert span.traceparent is None
    tracing.export_stages([Stage("queue", "decode-0", 1.0, 2.0)], INCOMING)
    tracing.close()


def test_a_span_continues_the_callers_trace(tracing: Tracing, exporter: InMemorySpanExporter) -> None:
    with tracing.span("request", INCOMING, {"size": 3}) as span:
        span.set({"later": "yes"})
        inner = span.traceparent
    tracing.flush()
    (found,) = exporter.get_finished_spans()
    assert found.parent is not None
    assert (f"{found.context.trace_id:032x}", f"{found.parent.span_id:016x}") == (TRACE_ID, SPAN_ID)
    assert inner == f"00-{TRACE_ID}-{found.context.span_id:016x}-01"
    assert found.attributes == {"size": 3, "later": "yes"}
    assert found.resource.attributes["service.instance.id"] == "decode-0"


def test_spans_nest_around_async_code_and_tasks_do_not_mix(tracing: Tracing, exporter: InMemorySpanExporter) -> None:
    async def serve(name: str, gate: asyncio.Barrier) -> None:
        with tracing.span(name):
            await gate.wait()
            with tracing.span(f"{name}.child"):
                await gate.wait()

    async def main() -> None:
        gate = asyncio.Barrier(2)
        await asyncio.gather(serve("a", gate), serve("b", gate))

    asyncio.run(main())
    tracing.flush()
    spans = {span.name: span for span in exporter.get_finished_spans()}
    for name in "ab":
        parent = spans[f"{name}.child"].parent
        assert parent is not None
        assert parent.span_id == spans[name].context.span_id
    assert spans["a"].context.trace_id != spans["b"].context.trace_id
    assert traceparent_var.get() is None


def test_an_error_marks_its_span(tracing: Tracing, exporter: InMemorySpanExporter) -> None:
    with pytest.raises(ValueError, match="boom"), tracing.span("request"):
        raise ValueError("boom")
    tracing.flush()
    (span,) = exporter.get_finished_spans()
    assert not span.status.is_ok
    assert span.attributes == {"error.type": "ValueError"}


def test_a_cancellation_is_noted_and_is_no_error(tracing: Tracing, exporter: InMemorySpanExporter) -> None:
    with pytest.raises(asyncio.CancelledError), tracing.span("request"):
        raise asyncio.CancelledError
    tracing.flush()
    (span,) = exporter.get_finished_spans()
    assert span.status.status_code.name == "UNSET"
    assert span.attributes == {"tandem.cancelled": True}


def test_an_unsampled_trace_is_passed_on_and_not_recorded(tracing: Tracing, exporter: InMemorySpanExporter) -> None:
    with tracing.span("request", f"00-{TRACE_ID}-{SPAN_ID}-00") as span:
        assert span.traceparent is not None
        assert span.traceparent.startswith(f"00-{TRACE_ID}-")
        assert span.traceparent.endswith("-00")
    tracing.flush()
    assert exporter.get_finished_spans() == ()


def test_stages_become_children_with_their_own_times(tracing: Tracing, exporter: InMemorySpanExporter) -> None:
    stages = [
        Stage("queue", "prefill-0", 1000.0, 0.5, {"num_waiting": 2}),
        Stage("first token", "decode-0", 1001.25, 0.0),
        Stage("skewed", "decode-0", 1001.0, -0.25),
    ]
    with tracing.span("request", INCOMING) as span:
        tracing.export_stages(stages, span.traceparent)
    tracing.flush()
    spans = {found.name: found for found in exporter.get_finished_spans()}
    queue = spans["queue"]
    assert (queue.start_time, queue.end_time) == (1_000_000_000_000, 1_000_500_000_000)
    assert queue.attributes == {"tandem.process": "prefill-0", "tandem.num_waiting": 2}
    assert queue.parent is not None
    assert queue.parent.span_id == spans["request"].context.span_id
    assert spans["first token"].start_time == spans["first token"].end_time == 1_001_250_000_000
    assert spans["skewed"].start_time == spans["skewed"].end_time


class Collector(http.server.BaseHTTPRequestHandler):
    """Takes what an OTLP exporter posts."""

    received: Queue[tuple[str, bytes]]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.received.put((self.path, body))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Nothing."""


@pytest.fixture
def collector() -> Iterator[tuple[str, Queue[tuple[str, bytes]]]]:
    received: Queue[tuple[str, bytes]] = Queue()
    handler = type("Handler", (Collector,), {"received": received})
    with http.server.HTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", received
        server.shutdown()
        thread.join()


def test_a_collector_receives_otlp(collector: tuple[str, Queue[tuple[str, bytes]]]) -> None:
    url, received = collector
    tracing = Tracing.configure("gateway", url)
    params = SamplingParams(max_tokens=5, temperature=0.0, seed=2**64 - 1, stop=("x",), n=2)
    with tracing.span("chat demo", INCOMING, request_attributes("chat", "demo", params)) as span:
        span.set(response_attributes("req-1", ["stop", "length"], 10, 7, 4))
    tracing.close()
    path, body = received.get(timeout=10)
    assert path == "/v1/traces"
    request = ExportTraceServiceRequest.FromString(body)
    (found,) = request.resource_spans[0].scope_spans[0].spans
    assert (found.name, found.trace_id.hex(), found.parent_span_id.hex()) == ("chat demo", TRACE_ID, SPAN_ID)
    values = {entry.key: entry.value for entry in found.attributes}
    assert values["gen_ai.request.max_tokens"].int_value == 5
    assert values["gen_ai.request.temperature"].double_value == 0.0
    assert values["gen_ai.request.choice.count"].int_value == 2
    assert values["gen_ai.usage.cache_read.input_tokens"].int_value == 4
    assert [v.string_value for v in values["gen_ai.response.finish_reasons"].array_value.values] == ["stop", "length"]


def test_a_seed_is_an_attribute_where_spans_can_carry_it() -> None:
    """Attributes are signed 64-bit integers; seeds go up to 2**64 - 1."""
    assert request_attributes("chat", "demo", SamplingParams(seed=5))["gen_ai.request.seed"] == 5
    assert "gen_ai.request.seed" not in request_attributes("chat", "demo", SamplingParams(seed=2**63))
    assert "gen_ai.request.seed" not in request_attributes("chat", "demo", SamplingParams())


def test_a_collector_that_is_away_holds_up_nobody() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
    tracing = Tracing.configure("gateway", f"http://127.0.0.1:{port}")
    began_s = time.monotonic()
    for i in range(1000):
        with tracing.span(f"request {i}"):
            pass
    assert time.monotonic() - began_s < 20.0
    tracing.close()
    assert time.monotonic() - began_s < 40.0


@pytest.mark.parametrize("endpoint", ["", "collector:4317", "grpc://collector:4317", "http://", "http://[::1"])
def test_an_endpoint_that_is_no_http_address_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigurationError, match="otlp_endpoint="):
        Tracing.configure("gateway", endpoint)


def test_an_endpoint_that_is_refused_is_told_without_its_password() -> None:
    with pytest.raises(ConfigurationError, match="otlp_endpoint='grpc://collector:4317'") as refused:
        Tracing.configure("gateway", "grpc://me:hush@collector:4317")
    assert "hush" not in str(refused.value)
