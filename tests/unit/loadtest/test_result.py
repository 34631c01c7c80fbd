"""Every counted request is in one place, refusals cost goodput, and the JSON holds what is drawn."""

import json

import pytest

from tandem.loadtest.client_cost import ClientCost
from tandem.loadtest.failure import UNFINISHED, Failure
from tandem.workload.slo import Slo
from tests.unit.loadtest.outcomes import FAILED, REFUSED, outcome, result, unanswered


def test_each_request_is_counted_once() -> None:
    cut = unanswered(0.3, Failure(UNFINISHED, ""))
    found = result(outcome(-1.0), outcome(0.0), outcome(0.1), unanswered(0.2, REFUSED), unanswered(0.2, FAILED), cut)
    assert found.report is not None
    assert (found.report.num_requests, found.report.num_completed) == (4, 2)
    assert (found.report.num_rejected, found.report.num_failed) == (1, 1)
    assert (found.num_warm_up, found.num_unfinished) == (1, 1)
    assert (found.num_prompt_tokens, found.num_cached_tokens, found.report.num_output_tokens) == (20, 8, 10)
    assert found.duration_s == found.report.duration_s == pytest.approx(0.24)


def test_goodput_counts_from_when_requests_were_due() -> None:
    found = result(outcome(0.0), outcome(0.0, late_s=0.6), outcome(0.0, tpot_s=0.1), unanswered(0.0, REFUSED))
    assert found.report is not None
    assert found.report_from_send is not None
    assert found.attainment == found.report.attainment == 0.25
    assert found.report_from_send.attainment == 0.5
    assert found.report.goodput_per_s == pytest.approx(1 / found.duration_s)


def test_quiet_seconds_at_the_end_are_a_part_of_the_time() -> None:
    found = result(outcome(0.0), least_duration_s=4.0)
    assert found.report is not None
    assert (found.duration_s, found.report.goodput_per_s, len(found.windows)) == (4.0, 0.25, 4)
    assert result(outcome(4.5), least_duration_s=4.0).duration_s == pytest.approx(4.64)


def test_latencies_are_of_answers_only() -> None:
    found = result(outcome(0.0, late_s=0.2), outcome(0.0, ttft_s=3.0, failure=FAILED))
    ttft, sent = found.latencies["ttft_s"], found.latencies["ttft_from_send_s"]
    assert ttft is not None
    assert sent is not None
    assert ttft.num_samples == 1
    assert [ttft.p50, sent.p50] == pytest.approx([0.3, 0.1])
    gaps = found.latencies["gap_s"]
    assert gaps is not None
    assert gaps.num_samples == 4


def test_failures_are_told_by_kind_with_a_few_examples() -> None:
    failed = [unanswered(0.0, Failure("http 500 x", f"broken {number}")) for number in range(9)]
    found = result(*failed, unanswered(0.0, REFUSED), outcome(0.0))
    first, second = found.failures
    assert (first.kind, first.count, first.is_refusal, len(first.examples)) == ("http 500 x", 9, False, 3)
    assert (second.kind, second.count, second.is_refusal) == (REFUSED.kind, 1, True)


def test_a_test_without_requests_is_no_error() -> None:
    found = result(outcome(-2.0), was_stopped=True)
    assert found.report is None
    assert found.attainment == 0.0
    assert found.windows == []
    assert json.loads(json.dumps(found.as_json()))["was_stopped"] is True


def test_the_json_is_plain_and_says_what_matters() -> None:
    outcomes = [outcome(index / 100, ttft_s=index / 1000) for index in range(101)]
    value = json.loads(json.dumps(result(*outcomes, client=ClientCost(0.9, None, None, ("busy",))).as_json()))
    assert value["format"] == 1
    assert value["command"] == "tandem load"
    assert value["quantiles"]["ttft_s"] == [index / 1000 for index in range(101)]
    assert value["slo"] == {"ttft_s": 0.5, "tpot_s": 0.05}
    assert value["client"] == {
        "cpu_cores": 0.9,
        "loop_lag_s": None,
        "lateness_s": None,
        "reasons": ["busy"],
        "is_saturated": True,
    }
    assert value["server"]["model"] == "scripted"
    assert value["pools"][1]["num_ready"] == 3
    assert value["windows"][0]["num_due"] == 100
    assert value["report"]["attainment"] == 1.0


def test_objectives_are_the_plans() -> None:
    assert result(outcome(0.0), slo=Slo(0.05, 1.0)).attainment == 0.0
