"""The gateway counts as the metrics library would, one value at a time."""

import random

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.parser import text_string_to_metric_families

from tandem.gateway.metrics import _GAP_S, GatewayMetrics

NAME = "vllm:inter_token_latency_seconds"


def samples(text: bytes) -> dict[tuple[str, str], float]:
    found = {}
    for family in text_string_to_metric_families(text.decode()):
        if family.name == NAME:
            found = {(one.name, one.labels.get("le", "")): one.value for one in family.samples}
    return found


def test_gaps_are_counted_as_the_library_counts_each() -> None:
    source = random.Random(7)
    metrics = GatewayMetrics("m")
    registry = CollectorRegistry()
    expected = Histogram(NAME, "", buckets=_GAP_S, registry=registry)
    gaps = [(0.005, 1), (0.0, 3), (99.0, 2)] + [(source.expovariate(20), source.randint(1, 5)) for _ in range(300)]
    for gap_s, num_tokens in gaps:
        metrics.observe_tokens(num_tokens, gap_s)
        for _ in range(num_tokens):
            expected.observe(gap_s / num_tokens)
    told = samples(metrics.text())
    wanted = {
        (one.name, one.labels.get("le", "")): one.value for family in registry.collect() for one in family.samples
    }
    assert told.keys() == {key for key in wanted if not key[0].endswith("_created")}
    for key, value in told.items():
        assert abs(value - wanted[key]) < 1e-9, key
    assert told[NAME + "_count", ""] == sum(num_tokens for _, num_tokens in gaps)


def test_gaps_name_their_model() -> None:
    assert f'{NAME}_count{{engine="0",model_name="m"}} 0.0'.encode() in GatewayMetrics("m").text()
