"""Prometheus metrics of a gateway: the `vllm:*` names that dashboards read, and its own `tandem_gateway_*`.

Each instance has its own registry, so that two gateways can live in one process.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from tandem.core.types import FinishReason
from tandem.gateway.prompt_encoder import EncodingCounts
from tandem.gateway.recent_traffic import RecentTraffic
from tandem.gateway.request import ChoiceEnd

_TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_GAP_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
_LIFE_S = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
_TOKENS = tuple(float(step * 10**power) for power in range(6) for step in (1, 2, 5))
_LABELS = ("model_name", "engine")


class GapHistogram(Collector):
    """Histogram of times between tokens that takes many equal values at once, which the library's histograms cannot."""

    def __init__(self, name: str, meaning: str, labels: Mapping[str, str]) -> None:
        self._name = name
        self._meaning = meaning
        self._labels = labels
        self._counts = [0] * (len(_GAP_S) + 1)
        self._sum_s = 0.0

    def observe(self, gap_s: float, num_tokens: int) -> None:
        """Records `num_tokens` equal gaps that add up to `gap_s` seconds."""
        self._counts[bisect_left(_GAP_S, gap_s / num_tokens)] += num_tokens
        self._sum_s += gap_s

    def collect(self) -> list[Metric]:
        ends = map(floatToGoString, (*_GAP_S, math.inf))
        buckets = list(zip(ends, map(float, accumulate(self._counts)), strict=True))
        family = HistogramMetricFamily(self._name, self._meaning, labels=tuple(self._labels))
        family.add_metric(tuple(self._labels.values()), buckets, self._sum_s)
        return [family]


class GatewayMetrics:
    """Metrics of one gateway that serves one model."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._values = (model_name, "0")
        self._ttft = self._histogram("vllm:time_to_first_token_seconds", "request taken to first token", _TTFT_S)
        self._gap = GapHistogram("vllm:inter_token_latency_seconds", "time between tokens", self._labels())
        self.registry.register(self._gap)
        self._per_token = self._histogram(
            "vllm:request_time_per_output_token_seconds", "mean time between a request's tokens", _GAP_S
        )
        self._life = self._histogram("vllm:e2e_request_latency_seconds", "request taken to its end", _LIFE_S)
        self._prompt = self._histogram("vllm:request_prompt_tokens", "prompt tokens of a request", _TOKENS)
        self._output = self._histogram("vllm:request_generation_tokens", "tokens generated for a request", _TOKENS)
        self._num_prompt = self._counter("vllm:prompt_tokens_total", "prompt tokens of requests that ended")
        self._num_output = self._counter("vllm:generation_tokens_total", "tokens generated")
        self.running = Gauge(
            "vllm:num_requests_running", "choices being served", _LABELS, registry=self.registry
        ).labels(*self._values)
        self.waiting = Gauge(
            "vllm:num_requests_waiting", "of those, choices that wait for room", _LABELS, registry=self.registry
        ).labels(*self._values)
        success = Counter(
            "vllm:request_success_total", "choices that ended", (*_LABELS, "finished_reason"), registry=self.registry
        )
        self._success = {reason: success.labels(*self._values, reason.value) for reason in FinishReason}
        self.failovers = Counter(
            "tandem_gateway_failovers_total", "choices that went on to another worker", registry=self.registry
        )
        self._rejected = Counter(
            "tandem_gateway_rejected_total", "requests answered with an error", ("reason",), registry=self.registry
        )
        self._turned_away = Counter(
            "tandem_gateway_turned_away_total",
            "of those, requests refused before a choice of theirs arrived",
            ("reason",),
            registry=self.registry,
        )
        self._arrivals = self._own_counter("arrivals", "choices that arrived, those refused later among them")
        self._arrived_tokens = self._own_counter("arrived_prompt_tokens", "prompt tokens of choices that arrived")
        self._queries = self._own_counter("prefix_cache_queries", "prompt tokens of choices that a worker finished")
        self._hits = self._own_counter("prefix_cache_hits", "of those, the tokens that needed no prefill")
        self._chat_tokens = self._own_counter("chat_prompt_tokens", "prompt tokens of chats that were read")
        self._known_tokens = self._own_counter("chat_known_tokens", "of those, tokens known from an earlier turn")
        self.recent = RecentTraffic()
        self.open_streams = Gauge("tandem_gateway_open_streams", "answers being streamed", registry=self.registry)
        self.disconnects = Counter(
            "tandem_gateway_disconnects_total", "clients that left before their answer's end", registry=self.registry
        )

    def observe_arrival(self, num_prompt_tokens: int) -> None:
        """Records a choice that is about to be paired with workers."""
        self.recent.note_arrival(num_prompt_tokens)
        self._arrivals.inc()
        self._arrived_tokens.inc(num_prompt_tokens)

    def observe_encoding(self, counts: EncodingCounts) -> None:
        """Records the prompt of a chat."""
        self._chat_tokens.inc(counts.num_tokens)
        self._known_tokens.inc(counts.num_known_tokens)

    def observe_first(self, ttft_s: float) -> None:
        """Records a choice's first token, `ttft_s` seconds after its request arrived."""
        self.recent.note_first(ttft_s)
        self._ttft.observe(ttft_s)

    def observe_tokens(self, num_tokens: int, gap_s: float) -> None:
        """Records tokens that arrived together, `gap_s` seconds after the previous ones, as evenly spaced."""
        self.recent.note_tokens(num_tokens, gap_s)
        self._gap.observe(gap_s, num_tokens)

    def observe_end(self, end: ChoiceEnd) -> None:
        """Records the end of a choice, whatever its reason."""
        self._success[end.reason].inc()
        self._num_prompt.inc(end.num_prompt_tokens)
        self._num_output.inc(end.num_output_tokens)
        if end.metrics is not None:
            self.recent.note_prompt(end.num_prompt_tokens, end.metrics.num_cached_tokens)
            self._queries.inc(end.num_prompt_tokens)
            self._hits.inc(end.metrics.num_cached_tokens)
        if end.reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._prompt.observe(end.num_prompt_tokens)
            self._output.observe(end.num_output_tokens)
            if end.duration_s is not None:
                self._life.observe(end.duration_s)
            if end.tpot_s is not None:
                self._per_token.observe(end.tpot_s)

    def rejected(self, code: str, status: int, *, has_arrived: bool) -> None:
        """Records a request that failed with an error of this status, or would have had it, had its answer not
        begun.

        Args:
            has_arrived: its choices were counted as arrivals.
        """
        self.recent.note_error(is_ours=status >= 500, has_arrived=has_arrived)
        self._rejected.labels(code).inc()
        if not has_arrived:
            self._turned_away.labels(code).inc()

    def text(self) -> bytes:
        """The body of `/metrics`."""
        return generate_latest(self.registry)

    def _labels(self) -> dict[str, str]:
        return dict(zip(_LABELS, self._values, strict=True))

    def _histogram(self, name: str, meaning: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, meaning, _LABELS, buckets=buckets, registry=self.registry).labels(*self._values)

    def _counter(self, name: str, meaning: str) -> Counter:
        return Counter(name, meaning, _LABELS, registry=self.registry).labels(*self._values)

    def _own_counter(self, name: str, meaning: str) -> Counter:
        return Counter(f"tandem_gateway_{name}_total", meaning, registry=self.registry)
