"""Result of a load test: one value that is written as JSON, printed as a table and plotted. Times in seconds.

Invariant: every counted request is completed, refused or failed; the last two are in `failures`. Requests that the
test's end left unfinished, and those of the warm-up, are counted apart.
"""

from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tandem.core.draft_counts import DraftCounts
from tandem.loadtest.client_cost import ClientCost
from tandem.loadtest.endpoint import ServerFacts
from tandem.loadtest.outcome import RequestOutcome
from tandem.loadtest.pool_watch import PoolSample, drafts_between
from tandem.loadtest.windows import ReportWindow, windows
from tandem.workload.slo import Percentiles, Slo, SloReport, ordered_percentiles, slo_report

FORMAT = 1
_MAX_EXAMPLES = 3
_STEPS = 100


@dataclass(frozen=True, slots=True)
class FailureKind:
    """One kind of refusal or failure, with some example messages."""

    kind: str
    count: int
    is_refusal: bool
    examples: Sequence[str]


@dataclass(frozen=True, slots=True)
class LoadResult:
    """The complete result.

    Args:
        report: latencies from due times, as users experience them; None when no request was counted.
        report_from_send: latencies from sending times: the server's contribution.
        latencies, quantiles: by measure; quantiles at 0 %, 1 %, … 100 %, for plots.
        window_s: width of `windows`, which may be larger than was asked for.
        pools: samples of the pools of workers; pools_problem: why there are no more of them.
        drafts: use of drafts while pools were sampled; None if there were none.
        was_stopped: before its planned end. trace_problem: the trace line that ended it.
        context: further fields of the JSON's top level, such as the workload.
    """

    slo: Slo
    duration_s: float
    was_stopped: bool
    trace_problem: str | None
    report: SloReport | None
    report_from_send: SloReport | None
    num_warm_up: int
    num_unfinished: int
    num_prompt_tokens: int
    num_cached_tokens: int
    failures: Sequence[FailureKind]
    latencies: Mapping[str, Percentiles | None]
    quantiles: Mapping[str, Sequence[float]]
    window_s: float
    windows: Sequence[ReportWindow]
    pools: Sequence[PoolSample]
    pools_problem: str | None
    drafts: DraftCounts | None
    client: ClientCost
    server: ServerFacts
    context: Mapping[str, Any]

    @property
    def attainment(self) -> float:
        """Share of counted requests that met the SLO; 0 if none were counted."""
        return 0.0 if self.report is None else self.report.attainment

    def as_json(self) -> dict[str, Any]:
        """The result as JSON values, rounded to microseconds. `FORMAT` grows when a field's name changes."""
        rest: dict[str, Any] = _rounded(asdict(self))
        context = rest.pop("context")
        rest["client"]["is_saturated"] = self.client.is_saturated
        return {"format": FORMAT, **context, **rest}


def sum_up(
    outcomes: Sequence[RequestOutcome],
    *,
    slo: Slo,
    least_duration_s: float,
    window_s: float,
    was_stopped: bool,
    trace_problem: str | None,
    pools: Sequence[PoolSample],
    pools_problem: str | None,
    client: ClientCost,
    server: ServerFacts,
    context: Mapping[str, Any],
) -> LoadResult:
    """Computes the result of a test that has ended.

    `least_duration_s`: lower bound of the duration that is reported, if any request was counted.
    """
    counted = [outcome for outcome in outcomes if not (outcome.is_warm_up or outcome.is_unfinished)]
    duration_s = max((outcome.ended_s for outcome in counted), default=0.0)
    duration_s = max(duration_s, least_duration_s) if counted else 0.0
    samples = dict(_measures(counted))
    width_s, over_time = windows(outcomes, window_s, duration_s) if duration_s else (window_s, [])
    return LoadResult(
        slo=slo,
        duration_s=duration_s,
        was_stopped=was_stopped,
        trace_problem=trace_problem,
        report=_report(counted, slo, duration_s, from_send=False),
        report_from_send=_report(counted, slo, duration_s, from_send=True),
        num_warm_up=sum(outcome.is_warm_up for outcome in outcomes),
        num_unfinished=sum(outcome.is_unfinished and not outcome.is_warm_up for outcome in outcomes),
        num_prompt_tokens=sum(outcome.num_prompt_tokens for outcome in counted if outcome.failure is None),
        num_cached_tokens=sum(outcome.num_cached_tokens for outcome in counted if outcome.failure is None),
        failures=_failures(counted),
        latencies={name: ordered_percentiles(ordered) for name, ordered in samples.items()},
        quantiles={name: _quantiles(ordered) for name, ordered in samples.items()},
        window_s=width_s,
        windows=over_time,
        pools=pools,
        pools_problem=pools_problem,
        drafts=drafts_between(pools),
        client=client,
        server=server,
        context=context,
    )


def _report(counted: Sequence[RequestOutcome], slo: Slo, duration_s: float, *, from_send: bool) -> SloReport | None:
    if not counted or not duration_s:
        return None
    return slo_report([outcome.served(from_send=from_send) for outcome in counted], slo, duration_s)


def _measures(counted: Sequence[RequestOutcome]) -> Iterator[tuple[str, Sequence[float]]]:
    """Sorted values of each measure, over answered requests."""
    answered = [outcome for outcome in counted if outcome.failure is None]
    due = [outcome.served() for outcome in answered]
    sent = [outcome.served(from_send=True) for outcome in answered]
    yield "ttft_s", sorted(one.ttft_s for one in due if one.ttft_s is not None)
    yield "ttft_from_send_s", sorted(one.ttft_s for one in sent if one.ttft_s is not None)
    yield "tpot_s", sorted(one.tpot_s for one in due if one.tpot_s is not None)
    yield "gap_s", _ordered_gaps_s(answered)
    yield "e2e_s", sorted(outcome.e2e_s for outcome in answered if outcome.e2e_s is not None)


def _ordered_gaps_s(answered: Sequence[RequestOutcome]) -> Sequence[float]:
    """NOTE: an array sorted in place: there is one value for each token, and a list takes six times the memory."""
    import numpy as np  # NOTE: only here: a client that starts and sends does without

    gaps_s = array("d")
    for outcome in answered:
        gaps_s.extend(outcome.gaps_s)
    np.asarray(gaps_s).sort()
    return gaps_s


def _failures(counted: Sequence[RequestOutcome]) -> list[FailureKind]:
    """Failures by kind, most frequent first."""
    failed = [outcome.failure for outcome in counted if outcome.failure is not None]
    kinds = Counter((failure.kind, failure.is_refusal) for failure in failed)
    messages = {
        key: list(dict.fromkeys(f.message for f in failed if (f.kind, f.is_refusal) == key))[:_MAX_EXAMPLES]
        for key in kinds
    }
    return [FailureKind(*key[:1], count, key[1], messages[key]) for key, count in kinds.most_common()]


def _quantiles(ordered: Sequence[float]) -> list[float]:
    """Quantiles at 0 %, 1 %, … 100 % by nearest rank, so that each is a measured value; empty without values."""
    last = len(ordered) - 1
    return [ordered[round(last * step / _STEPS)] for step in range(_STEPS + 1)] if ordered else []


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, dict):
        return {key: _rounded(entry) for key, entry in value.items()}
    return [_rounded(entry) for entry in value] if isinstance(value, list | tuple) else value
