"""Prometheus metrics of one worker: the `vllm:*` names that dashboards and gateways read, and our `tandem_*` ones.

Takes plain values, so that it needs no engine; every metric belongs to the registry given. Label values are bounded, so
peers cannot create unlimited time series. A count whose labels are known is exported as 0 from the start: a rate over a
series that begins at 1 misses its first event.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from tandem.core.draft_counts import DraftCounts
from tandem.core.expert_rows import ExpertRows
from tandem.core.output import RequestMetrics
from tandem.core.pins import Pin
from tandem.core.types import FinishReason
from tandem.routing.snapshot import WorkerState
from tandem.telemetry.draft_metrics import DraftMetrics

_ENGINE = "0"
_MAX_REASONS = 32
_LATENCY_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_GAP_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
_REQUEST_S = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
_TRANSFER_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


class _Link(Protocol):
    @property
    def source_id(self) -> str: ...
    @property
    def bytes_per_s(self) -> float: ...


class ExportedStatus(Protocol):
    """The part of `rpc.messages.WorkerStatus` that is exported; this package may not import `rpc`."""

    @property
    def state(self) -> WorkerState: ...
    @property
    def blocks(self) -> Mapping[str, int]: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def links(self) -> Sequence[_Link]: ...


class Promised(Protocol):
    """The part of `kvcache.promised_blocks.PromisedUsage`, the use by pinned prefixes, that is exported."""

    @property
    def num_host(self) -> int: ...
    @property
    def num_moved(self) -> int: ...
    @property
    def num_restored(self) -> int: ...
    @property
    def num_broken(self) -> int: ...


class LabelledGauge:
    """A gauge with one label, whose values all change at once.

    NOTE: to find the gauge of a label's value costs more than to set it, so they are looked up when they change.
    """

    def __init__(self, name: str, meaning: str, label: str, registry: CollectorRegistry) -> None:
        self._gauge = Gauge(name, meaning, [label], registry=registry)
        self._by_label: dict[str, Gauge] = {}

    def set(self, values: Mapping[str, float]) -> None:
        """Export these values; labels that are not among them are removed."""
        if self._by_label.keys() != values.keys():
            self._gauge.clear()
            self._by_label = {label: self._gauge.labels(label) for label in values}
        for label, value in values.items():
            self._by_label[label].set(value)


class WorkerMetrics:
    """A worker's metrics. Not thread-safe: call `observe_status` from one thread only.

    Args:
        registry: registry of all metrics; its owner serves it.
        model_name: the served model name.
        max_model_len: bounds the buckets of token counts.
        max_drafts: most drafts of a request's step.
    """

    def __init__(
        self, registry: CollectorRegistry, model_name: str, *, max_model_len: int = 1 << 17, max_drafts: int = 1
    ) -> None:
        self._registry = registry
        self._model_name = model_name
        tokens = tuple(_one_two_five(max_model_len))
        self._running = self._gauge("num_requests_running", "requests that hold blocks")
        self._waiting = self._gauge("num_requests_waiting", "requests that queue")
        self._usage = self._gauge("kv_cache_usage_perc", "share of KV blocks in use, 1 is all")
        self._prompt_tokens = self._counter("prompt_tokens", "prompt tokens of requests that ended")
        self._generation_tokens = self._counter("generation_tokens", "tokens generated")
        self._queries = self._counter("prefix_cache_queries", "prompt tokens looked up in the prefix cache")
        self._hits = self._counter("prefix_cache_hits", "prompt tokens found in the prefix cache")
        self._preemptions = self._counter("num_preemptions", "times a request lost its blocks to another")
        self._ttft = self._histogram("time_to_first_token_seconds", "arrival to first token", _LATENCY_S)
        self._gap = self._histogram("inter_token_latency_seconds", "between two tokens of a request", _GAP_S)
        self._tpot = self._histogram("request_time_per_output_token_seconds", "a request's mean gap", _GAP_S)
        self._queue = self._histogram("request_queue_time_seconds", "arrival to first scheduled", _REQUEST_S)
        self._prefill = self._histogram("request_prefill_time_seconds", "first scheduled to first token", _REQUEST_S)
        self._decode = self._histogram("request_decode_time_seconds", "first token to last", _REQUEST_S)
        self._e2e = self._histogram("e2e_request_latency_seconds", "arrival to last token", _REQUEST_S)
        self._request_prompt = self._histogram("request_prompt_tokens", "prompt tokens of a request", tokens)
        self._request_output = self._histogram("request_generation_tokens", "tokens generated for a request", tokens)
        labels = ["model_name", "engine", "finished_reason"]
        success = Counter("vllm:request_success", "requests that ended", labels, registry=registry)
        self._success = {reason: success.labels(model_name, _ENGINE, reason.value) for reason in FinishReason}
        self._cache_config = Gauge(
            "vllm:cache_config_info", "always 1", ["block_size", "num_gpu_blocks", "engine"], registry=registry
        )
        self._cache_sizes: tuple[int, int] | None = None
        self._blocks = LabelledGauge("tandem_kv_blocks", "KV blocks by state", "state", registry)
        self._block_bytes = Gauge("tandem_kv_block_bytes", "bytes of a KV block", registry=registry)
        self._read_bytes = Counter(
            "tandem_state_read_bytes",
            "state (KV and others) that decode steps read, drafts not counted",
            registry=registry,
        )
        self._last_read_bytes = 0.0
        self._expert_rows = Counter(
            "tandem_expert_rows", "tokens at experts, by the rank that has the expert", ["rank"], registry=registry
        )
        self._busiest_rows = Counter(
            "tandem_busiest_expert_rows",
            "of these, of each layer and step the busiest rank's",
            registry=registry,
        )
        self._last_rows = ExpertRows()
        self._held_bytes = LabelledGauge(
            "tandem_state_held_bytes",
            "state (KV and others) that the next queries of requests see, and all pages that requests hold",
            "of",
            registry,
        )
        self._host_bytes = Gauge("tandem_kv_host_bytes", "host memory that holds pinned prefixes", registry=registry)
        pinned_blocks = Counter(
            "tandem_kv_pinned_blocks", "blocks of pinned prefixes by what became of them", ["event"], registry=registry
        )
        self._pinned_blocks = {event: pinned_blocks.labels(event) for event in ("moved", "restored", "broken")}
        pins = Counter("tandem_pins", "pins asked for by what was granted", ["outcome"], registry=registry)
        self._pins = {outcome: pins.labels(outcome) for outcome in ("whole", "part", "none")}
        self._last_promised: dict[str, int] = {}
        self._leases = LabelledGauge("tandem_leases", "leases on this worker's blocks by state", "state", registry)
        self._transfer_s = Histogram(
            "tandem_transfer_seconds", "duration of a KV transfer", buckets=_TRANSFER_S, registry=registry
        )
        self._transfer_bytes = Counter("tandem_transfer_bytes", "KV bytes pulled from peers", registry=registry)
        self._transfer_failures = Counter(
            "tandem_transfer_failures", "KV transfers that failed", ["reason"], registry=registry
        )
        self._link_rate = LabelledGauge(
            "tandem_link_bytes_per_second", "measured rate of pulling from a peer", "source", registry
        )
        self._reasons: set[str] = set()
        self._drafts = DraftMetrics((model_name, _ENGINE), max_drafts)
        registry.register(self._drafts)

    def observe_status(self, status: ExportedStatus) -> None:
        """Export a worker's status; entries that it no longer contains are removed."""
        state = status.state
        self._running.set(max(0, state.num_running - status.num_waiting))
        self._waiting.set(status.num_waiting)
        idle = status.blocks.get("free", 0) + status.blocks.get("cached", 0)
        total = sum(status.blocks.values())
        self._usage.set(1 - idle / total if total else 0.0)
        if self._cache_sizes != (sizes := (state.block_size, state.num_total_blocks)):
            self._cache_sizes = sizes
            self._cache_config.clear()
            self._cache_config.labels(*map(str, sizes), _ENGINE).set(1)
        self._blocks.set(status.blocks)
        self._link_rate.set({link.source_id: link.bytes_per_s for link in status.links})

    def observe_leases(self, counts: Mapping[str, int]) -> None:
        """Export the current number of leases on this worker's blocks, by state."""
        self._leases.set(counts)

    def observe_drafts(self, counts: DraftCounts) -> None:
        """Exports the current totals of speculative decoding."""
        self._drafts.counts = counts

    def observe_reads(self, num_bytes: float) -> None:
        """Exports the bytes of state (KV and others) that decode steps have read so far; they must not decrease."""
        self._read_bytes.inc(num_bytes - self._last_read_bytes)
        self._last_read_bytes = num_bytes

    def observe_experts(self, rows: ExpertRows) -> None:
        """Exports the tokens that each rank's experts have computed so far; totals must not decrease."""
        last = self._last_rows.by_rank or (0,) * len(rows.by_rank)
        for rank, (now, before) in enumerate(zip(rows.by_rank, last, strict=True)):
            self._expert_rows.labels(str(rank)).inc(now - before)
        self._busiest_rows.inc(rows.busiest - self._last_rows.busiest)
        self._last_rows = rows

    def observe_held(self, num_bytes: int, page_bytes: int) -> None:
        """Exports the bytes of state (KV and others) that running requests need now, and those of all their pages."""
        self._held_bytes.set({"state": num_bytes, "pages": page_bytes})

    def observe_promised(self, promised: Promised, block_bytes: int) -> None:
        """Exports the host memory of pinned prefixes and what became of their blocks. Totals must not decrease."""
        self._block_bytes.set(block_bytes)
        self._host_bytes.set(promised.num_host * block_bytes)
        totals = {"moved": promised.num_moved, "restored": promised.num_restored, "broken": promised.num_broken}
        for event, total in totals.items():
            self._pinned_blocks[event].inc(total - self._last_promised.get(event, 0))
        self._last_promised = totals

    def observe_pins(self, asked: Sequence[Pin], metrics: RequestMetrics, block_size: int) -> None:
        """Counts a request's pins by what was granted; none if another worker computed its prompt."""
        for wanted, granted in zip(asked, metrics.pins, strict=False):
            num_whole = min(wanted.num_tokens, metrics.num_prompt_tokens) // block_size * block_size
            outcome = "whole" if granted.num_tokens >= num_whole else "part" if granted.num_tokens else "none"
            self._pins[outcome].inc()

    def observe_tokens(self, num_tokens: int, gap_s: float | None) -> None:
        """Count new tokens of one request, `gap_s` after its previous ones; None for its first."""
        self._generation_tokens.inc(num_tokens)
        if gap_s is not None and num_tokens > 0:
            for _ in range(num_tokens):
                self._gap.observe(gap_s / num_tokens)

    def observe_request(self, metrics: RequestMetrics, finish_reason: FinishReason) -> None:
        """Count a request that ended; its generated tokens were counted by `observe_tokens`."""
        self._success[finish_reason].inc()
        self._prompt_tokens.inc(metrics.num_prompt_tokens)
        if metrics.first_scheduled_s is not None:
            self._queries.inc(metrics.num_prompt_tokens)
            self._hits.inc(metrics.num_cached_tokens)
        self._preemptions.inc(metrics.num_preemptions)
        self._request_prompt.observe(metrics.num_prompt_tokens)
        self._request_output.observe(metrics.num_output_tokens)
        arrival_s, scheduled_s = metrics.arrival_s, metrics.first_scheduled_s
        first_s, last_s = metrics.first_token_s, metrics.last_token_s
        _observe(self._queue, arrival_s, scheduled_s)
        _observe(self._prefill, scheduled_s, first_s)
        _observe(self._ttft, arrival_s, first_s)
        _observe(self._decode, first_s, last_s)
        _observe(self._e2e, arrival_s, last_s)
        if metrics.tpot_s is not None:
            self._tpot.observe(metrics.tpot_s)

    def observe_transfer(self, num_bytes: int, seconds: float, failure: str | None = None) -> None:
        """Count a KV transfer that ended. `failure`: short reason if it failed."""
        if failure is not None:
            self._transfer_failures.labels(self._bounded(failure)).inc()
            return
        self._transfer_s.observe(seconds)
        self._transfer_bytes.inc(num_bytes)

    def _bounded(self, reason: str) -> str:
        if reason not in self._reasons and len(self._reasons) >= _MAX_REASONS:
            return "other"
        self._reasons.add(reason)
        return reason

    def _gauge(self, name: str, meaning: str) -> Gauge:
        return Gauge(f"vllm:{name}", meaning, ["model_name", "engine"], registry=self._registry).labels(
            self._model_name, _ENGINE
        )

    def _counter(self, name: str, meaning: str) -> Counter:
        return Counter(f"vllm:{name}", meaning, ["model_name", "engine"], registry=self._registry).labels(
            self._model_name, _ENGINE
        )

    def _histogram(self, name: str, meaning: str, buckets: Sequence[float]) -> Histogram:
        labels = ["model_name", "engine"]
        return Histogram(f"vllm:{name}", meaning, labels, buckets=buckets, registry=self._registry).labels(
            self._model_name, _ENGINE
        )


def _observe(histogram: Histogram, begin_s: float | None, end_s: float | None) -> None:
    """NOTE: a token from a prefill worker may come before its request is scheduled here; a sum must never fall."""
    if begin_s is not None and end_s is not None:
        histogram.observe(max(0.0, end_s - begin_s))


def _one_two_five(largest: int) -> Iterator[float]:
    """1, 2, 5, 10, 20, … up to the first that reaches `largest`."""
    value, magnitude = 0, 1
    while value < largest:
        for digit in (1, 2, 5):
            value = digit * magnitude
            yield float(value)
            if value >= largest:
                return
        magnitude *= 10
