"""Prometheus metrics of speculative decoding: drafted and accepted tokens by position, and tokens per decode step.

Created from a worker's totals whenever metrics are read, so no differences have to be computed. Without drafts the
counts are 0 and every step brings one token.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from tandem.core.draft_counts import DraftCounts

_LABELS = ("model_name", "engine")


class DraftMetrics(Collector):
    """Exports `counts`, the latest totals, which must not decrease, except for the time saved.

    Args:
        label_values: of the labels model_name and engine.
        max_drafts: number of positions that are exported from the start.
    """

    def __init__(self, label_values: tuple[str, str], max_drafts: int) -> None:
        self.counts = DraftCounts()
        self._label_values = label_values
        self._max_drafts = max_drafts

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily]:
        counts = self.counts
        drafted = _padded(counts.drafted_at, self._max_drafts)
        accepted = _padded(counts.accepted_at, self._max_drafts)
        yield self._counter("vllm:spec_decode_num_drafts", "decode steps of requests with drafts", drafted[0])
        yield self._counter("vllm:spec_decode_num_draft_tokens", "drafted tokens", counts.num_drafted)
        yield self._counter("vllm:spec_decode_num_accepted_tokens", "accepted tokens", counts.num_accepted)
        name = "vllm:spec_decode_num_accepted_tokens_per_pos"
        yield self._by_position(name, "accepted tokens by position of the draft", accepted)
        yield self._by_position("tandem_draft_tokens_per_pos", "drafted tokens by position of the draft", drafted)
        yield self._tokens_per_step(_padded(counts.steps_by_tokens, 1 + self._max_drafts))
        meaning = "estimated seconds that drafts saved; falls where they cost more"
        saved = GaugeMetricFamily("tandem_draft_saved_seconds", meaning, labels=_LABELS)
        saved.add_metric(self._label_values, counts.saved_s or 0.0)
        yield saved

    def _counter(self, name: str, meaning: str, value: int) -> CounterMetricFamily:
        family = CounterMetricFamily(name, meaning, labels=_LABELS)
        family.add_metric(self._label_values, value)
        return family

    def _by_position(self, name: str, meaning: str, values: Sequence[int]) -> CounterMetricFamily:
        family = CounterMetricFamily(name, meaning, labels=(*_LABELS, "position"))
        for position, value in enumerate(values):
            family.add_metric((*self._label_values, str(position)), value)
        return family

    def _tokens_per_step(self, steps_by_tokens: Sequence[int]) -> HistogramMetricFamily:
        ends = [*(f"{num_tokens}.0" for num_tokens in range(1, len(steps_by_tokens) + 1)), "+Inf"]
        buckets = list(zip(ends, map(float, accumulate((*steps_by_tokens, 0))), strict=True))
        num_tokens = sum(count * steps for count, steps in enumerate(steps_by_tokens, 1))
        family = HistogramMetricFamily("tandem_tokens_per_step", "tokens of a request's decode step", labels=_LABELS)
        family.add_metric(self._label_values, buckets, num_tokens)
        return family


def _padded(values: Sequence[int], length: int) -> list[int]:
    return [*values, *[0] * (length - len(values))]
