"""Counters of one gateway since it started, parsed from the text of its /metrics.

Uses the names exported by `tandem.gateway.metrics`; the figures of several models are summed.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tandem.core.errors import InvalidRequestError, UnavailableError, shown
from tandem.planner_service.distribution import NOTHING, Distribution

OVERLOAD_CODES = ("capacity_exceeded", "unavailable", "timeout")
_TTFT = "vllm:time_to_first_token_seconds"
_TPOT = "vllm:request_time_per_output_token_seconds"
_BORN = "tandem_gateway_arrivals_created"
_READ = (
    *("tandem_gateway_arrivals_", "tandem_gateway_arrived_prompt_tokens_", "tandem_gateway_prefix_cache_"),
    *("tandem_gateway_rejected_", "tandem_gateway_turned_away_"),
    *("vllm:request_success_", "vllm:request_generation_tokens_sum", _TTFT, _TPOT),
)
"""Beginnings of the lines that are read. The others are not even parsed: they are most of a page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayCounts:
    """Counts since the gateway's start. Requests are counted as choices (an HTTP call with n=2 has two).

    Args:
        born_s: start of counting by the gateway's wall clock, seconds since 1970; None if not exported.
        num_refused: HTTP calls answered with an error because of load or time limits.
        num_turned_away: the part of `num_refused` that never became choices.
        num_looked_up_tokens, num_cached_tokens: prompt tokens of finished choices, and those of them found in a cache.
        ttft, tpot: distributions in seconds.
    """

    born_s: float | None = None
    num_arrivals: float = 0.0
    num_arrived_tokens: float = 0.0
    num_ended: float = 0.0
    num_refused: float = 0.0
    num_turned_away: float = 0.0
    num_output_tokens: float = 0.0
    num_looked_up_tokens: float = 0.0
    num_cached_tokens: float = 0.0
    ttft: Distribution = NOTHING
    tpot: Distribution = NOTHING

    def since(self, earlier: "GatewayCounts") -> "GatewayCounts":
        """Returns the counts added after `earlier`."""
        counted = {name: max(0.0, getattr(self, name) - getattr(earlier, name)) for name in _COUNTERS}
        return GatewayCounts(
            born_s=self.born_s,
            ttft=self.ttft.since(earlier.ttft),
            tpot=self.tpot.since(earlier.tpot),
            **counted,
        )

    def scaled(self, factor: float) -> "GatewayCounts":
        counted = {name: factor * getattr(self, name) for name in _COUNTERS}
        return GatewayCounts(ttft=self.ttft.scaled(factor), tpot=self.tpot.scaled(factor), **counted)

    def __add__(self, other: "GatewayCounts") -> "GatewayCounts":
        counted = {name: getattr(self, name) + getattr(other, name) for name in _COUNTERS}
        return GatewayCounts(ttft=self.ttft + other.ttft, tpot=self.tpot + other.tpot, **counted)

    def began_anew_after(self, earlier: "GatewayCounts") -> bool:
        """Whether the counters were reset since `earlier`: another process answers now."""
        return self.born_s != earlier.born_s or any(getattr(self, name) < getattr(earlier, name) for name in _COUNTERS)


_COUNTERS = tuple(field.name for field in fields(GatewayCounts) if field.name.startswith("num_"))


def parse_counts(text: str) -> GatewayCounts:
    """Parses a gateway's /metrics.

    Raises:
        UnavailableError: the text is not what a gateway exports.
    """
    samples: dict[str, list[Sample]] = {}
    try:
        read = "\n".join(line for line in text.splitlines() if line.startswith(_READ))
        for family in text_string_to_metric_families(read):
            for sample in family.samples:
                samples.setdefault(sample.name, []).append(sample)
        return _counts_of(samples)
    except (ValueError, KeyError, IndexError, InvalidRequestError) as error:
        raise UnavailableError(f"its /metrics cannot be read: {shown(str(error))}") from error


def _counts_of(samples: Mapping[str, list[Sample]]) -> GatewayCounts:
    if "tandem_gateway_arrivals_total" not in samples:
        raise InvalidRequestError("tandem_gateway_arrivals_total is missing; is it a gateway of this version?")
    ended = samples.get("vllm:request_success_total", [])
    return GatewayCounts(
        born_s=_sum(samples[_BORN]) if _BORN in samples else None,
        num_arrivals=_sum(samples["tandem_gateway_arrivals_total"]),
        num_arrived_tokens=_sum(samples.get("tandem_gateway_arrived_prompt_tokens_total", [])),
        num_ended=_sum([sample for sample in ended if sample.labels.get("finished_reason") in ("stop", "length")]),
        num_refused=_overload(samples, "tandem_gateway_rejected_total"),
        num_turned_away=_overload(samples, "tandem_gateway_turned_away_total"),
        num_output_tokens=_sum(samples.get("vllm:request_generation_tokens_sum", [])),
        num_looked_up_tokens=_sum(samples.get("tandem_gateway_prefix_cache_queries_total", [])),
        num_cached_tokens=_sum(samples.get("tandem_gateway_prefix_cache_hits_total", [])),
        ttft=_distribution(samples, _TTFT),
        tpot=_distribution(samples, _TPOT),
    )


def _overload(samples: Mapping[str, list[Sample]], name: str) -> float:
    return _sum([sample for sample in samples.get(name, []) if sample.labels.get("reason") in OVERLOAD_CODES])


def _sum(samples: list[Sample]) -> float:
    found = sum(sample.value for sample in samples)
    if not 0 <= found < math.inf:
        raise InvalidRequestError(f"{samples[0].name} is {found}, which no counter is")
    return float(found)


def _distribution(samples: Mapping[str, list[Sample]], name: str) -> Distribution:
    counts: dict[float, float] = {}
    for sample in samples.get(f"{name}_bucket", []):
        bound = float(sample.labels["le"])
        counts[bound] = counts.get(bound, 0.0) + sample.value
    bounds = tuple(sorted(counts))
    return Distribution(bounds, tuple(counts[bound] for bound in bounds), _sum(samples.get(f"{name}_sum", [])))
