"""Medians, ratios, aims and the table, from runs written by hand."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from bench.race.aims import AIMS, FLOOR, Aim, Verdict, verdicts
from bench.race.answer import Answer
from bench.race.metrics import HEADLINES, METRICS
from bench.race.pictures import draw
from bench.race.runs import Run, Slot
from bench.race.summary import BEST, Comparison, Summary
from bench.race.table import markdown
from bench.race.workloads import WORKLOADS, Batch, Played
from tests.unit.bench.race.runs_by_hand import measured, run


def rates(system: str, *values: float, workload: str = "batch") -> list[Run]:
    return [run(system, workload, turn, output_rate=value) for turn, value in enumerate(values)]


def summary(*runs: Run | list[Run]) -> Summary:
    return Summary.of("small", [one for group in runs for one in ([group] if isinstance(group, Run) else group)])


def test_a_figure_is_the_median_of_its_rounds() -> None:
    cell = summary(rates("tandem", 3.0, 9.0, 4.0)).cells["batch", "tandem", "output rate"]
    assert cell.value == 4.0
    assert cell.by_turn == {0: 3.0, 1: 9.0, 2: 4.0}


def test_a_ratio_is_the_median_of_the_rounds_own_ratios() -> None:
    """The machine was twice as slow in the second round, for both: the ratio of medians would say 1.5."""
    found = summary(rates("tandem", 4.0, 2.0, 6.0), rates("vllm", 2.0, 1.0, 6.0))
    assert found.ratio("batch", "output rate", "tandem", "vllm") == 2.0


def test_above_one_is_ahead_whichever_way_is_better() -> None:
    found = summary(
        run("tandem", "single", TPOT_p50=5.0, output_rate=20.0), run("vllm", "single", TPOT_p50=10.0, output_rate=10.0)
    )
    assert found.ratio("single", "TPOT p50", "tandem", "vllm") == 2.0
    assert found.ratio("single", "output rate", "tandem", "vllm") == 2.0


def test_rounds_that_only_one_of_the_two_has_do_not_count() -> None:
    found = summary(rates("tandem", 4.0, 100.0), rates("vllm", 2.0))
    assert found.ratio("batch", "output rate", "tandem", "vllm") == 2.0


def test_without_a_common_round_medians_are_compared() -> None:
    late = run("vllm", "batch", 1, output_rate=2.0)
    assert summary(rates("tandem", 4.0), late).ratio("batch", "output rate", "tandem", "vllm") == 2.0


def test_what_was_not_measured_has_no_ratio() -> None:
    found = summary(rates("tandem", 4.0))
    assert found.ratio("batch", "output rate", "tandem", "vllm") is None
    assert found.ratio("batch", "output rate", "tandem", None) is None
    assert found.best_peer("batch", "output rate") is None


def test_the_best_peer_is_found_figure_by_figure_and_is_never_ours() -> None:
    found = summary(
        run("tandem-1p1d", "single", TPOT_p50=1.0, output_rate=99.0),
        run("vllm", "single", TPOT_p50=10.0, output_rate=30.0),
        run("openvino", "single", TPOT_p50=9.0, output_rate=20.0),
    )
    assert found.best_peer("single", "TPOT p50") == "openvino"
    assert found.best_peer("single", "output rate") == "vllm"


def test_comparisons() -> None:
    found = summary(rates("tandem", 6.0), rates("tandem-1p1d", 3.0), rates("openvino", 4.0), rates("vllm-1p1d", 1.0))
    assert list(found.comparisons("batch", "output rate")) == [
        Comparison("tandem", "openvino", 1.5),
        Comparison("tandem-1p1d", "openvino", 0.75),
        Comparison("tandem-1p1d", "vllm-1p1d", 3.0),
        Comparison("tandem-1p1d", "tandem", 0.5),
    ]


def test_drafts_are_compared_with_off_and_with_a_peers_which_is_no_best_peer() -> None:
    found = summary(rates("tandem", 6.0), rates("tandem-drafts", 9.0), rates("vllm", 4.0), rates("vllm-drafts", 18.0))
    assert list(found.comparisons("batch", "output rate")) == [
        Comparison("tandem", "vllm", 1.5),
        Comparison("tandem-drafts", "vllm-drafts", 0.5),
        Comparison("tandem-drafts", "tandem", 1.5),
    ]


@pytest.mark.parametrize(("speed", "is_met"), [(0.98, True), (0.96, False)])
def test_drafts_may_cost_three_per_cent_in_every_workload(speed: float, is_met: bool) -> None:
    runs = []
    for workload, name in HEADLINES.items():
        drafting = 100.0 * speed if METRICS[name].is_rate else 100.0 / speed
        for system, value in (("tandem", 100.0), ("tandem-drafts", drafting)):
            runs.append(Run(Slot("small", workload, system, 0), {}, measured({name: value})))
    told = {one.aim.workload: one.is_met for one in verdicts(summary(runs)) if one.aim.system == "tandem-drafts"}
    assert told == dict.fromkeys(HEADLINES, is_met)


def test_shares_of_the_floor_are_of_its_speed() -> None:
    found = summary(
        run("tandem", "single", floors={"TPOT p50": 4.0, "output rate": 200.0}, TPOT_p50=5.0, output_rate=100.0)
    )
    assert found.cells["single", "tandem", "TPOT p50"].share(METRICS["TPOT p50"]) == 0.8
    assert found.cells["single", "tandem", "output rate"].share(METRICS["output rate"]) == 0.5


def test_rows_of_the_report_hold_figures_and_ratios() -> None:
    floors = {"output rate": 12.0}
    found = summary(run("tandem", "batch", floors=floors, foreign_cores=0.4, output_rate=6.0), rates("vllm", 4.0))
    figure, theirs, ratio = found.rows()
    assert (figure.workload, figure.system, figure.metric, figure.unit) == (
        "small · batch",
        "tandem",
        "output rate",
        "tok/s",
    )
    assert (figure.value, figure.floor, figure.share, figure.samples, figure.foreign_cores) == (
        6.0,
        12.0,
        0.5,
        (6.0,),
        0.4,
    )
    assert (theirs.system, theirs.floor, theirs.share) == ("vllm", None, None)
    assert (ratio.metric, ratio.value, ratio.unit) == ("output rate, times better than vllm", 1.5, "x")
    assert json.dumps([asdict(row) for row in found.rows()])


def test_answers_in_one_event_have_no_time_a_token_to_compare() -> None:
    """It was written as 0, which was the best of all, and whose share of the floor divided by it."""
    single = Batch("single", "single", num_requests=1, concurrency=1, own=4, output=8)
    figures = single.figures(Played([Answer(0.0, ((0.5, 8),), 4, 8)]))
    at_once = measured(figures, floors={"TPOT p50": 4.0, "output rate": 20.0})
    found = summary(
        Run(Slot("small", "single", "vllm", 0), {}, at_once, date="2026-01-01"),
        run("openvino", "single", TPOT_p50=9.0),
    )
    assert "|  | output rate, tok/s | 16 (80%) | - |" in markdown(found, {}, {})
    assert found.best_peer("single", "TPOT p50") == "openvino"
    assert json.dumps([asdict(row) for row in found.rows()])


def test_runs_of_another_shape_are_not_mixed_in() -> None:
    assert summary(run("tandem", "batch", shape="qwen3-0.6b", output_rate=1.0)).cells == {}


def test_one_reason_for_many_lost_workloads_is_said_once() -> None:
    found = summary(
        run("vllm", "batch", failure="it died\n of hunger"),
        run("vllm", "turns", failure="it died\n of hunger"),
        run("vllm", "turns", 1, failure="other"),
        rates("tandem", 1.0),
    )
    assert found.failures() == [
        "small · vllm, round 1, lost batch, turns: it died of hunger",
        "small · vllm, round 2, lost turns: other",
    ]


def test_circumstances_say_how_busy_the_client_was_and_what_the_machine_gave() -> None:
    client, machine, when = summary(rates("tandem", 1.0, 2.0), run("vllm", "batch", failure="it died")).circumstances()
    assert client == "small: the client used at most 0.10 cores"
    assert machine == "small: 1 to 1 GB/s read, 1 to 1 GFLOP/s of products"
    assert when == "small: measured at no commit, 2026-01-01 to 2026-01-02"
    assert Summary("empty").circumstances() == []


def test_the_table_shows_figures_shares_ratios_and_what_is_weak() -> None:
    found = summary(
        run("tandem", "batch", floors={"output rate": 8.0}, foreign_cores=0.4, output_rate=6.0),
        rates("vllm", 4.0),
        run("openvino", "turns", failure="it died"),
    )
    text = markdown(found, {"batch": "a batch"}, {"llama-cpp": "no compiler"})
    assert "| workload | figure | tandem | vllm | tandem / best peer | 1P1D / vLLM 1P1D | 1P1D / tandem |" in text
    assert "| a batch | output rate, tok/s | 6* (75%) | 4 | 1.50 (vllm) |  |  |" in text
    assert "- llama-cpp took no part: no compiler" in text
    assert "- small · openvino, round 1, lost turns: it died" in text
    assert "| batch | output rate | tandem / best peer | 1.2 | 1.50 | met |" in text


def test_a_figure_that_one_system_lacks_is_a_dash() -> None:
    found = summary(rates("tandem", 6.0), rates("vllm", 4.0, workload="turns"))
    text = markdown(found, {}, {})
    assert "| batch | output rate, tok/s | 6 | - |  |  |  |" in text
    assert "| turns | output rate, tok/s | - | 4 |  |  |  |" in text


def test_aims_are_about_what_is_raced() -> None:
    keys = {workload.key for workload in WORKLOADS}
    assert {aim.workload for aim in AIMS} == keys
    assert {aim.name for aim in AIMS} <= METRICS.keys()
    assert HEADLINES.keys() == keys


def test_aims_say_met_missed_or_not_measured() -> None:
    aim = Aim("batch", "output rate", "tandem", BEST, 1.2)
    assert Verdict(aim, 1.2).is_met
    assert "| met |" in Verdict(aim, 1.2).line()
    assert "**missed**" in Verdict(aim, 1.19).line()
    assert "not measured" in Verdict(aim, None).line()


def test_aims_against_each_kind_of_rival() -> None:
    found = summary(
        run("tandem", "single", floors={"TPOT p50": 6.0}, TPOT_p50=8.0, output_rate=100.0),
        run("tandem-1p1d", "single", TPOT_p50=10.0, output_rate=95.0),
        run("vllm", "single", TPOT_p50=12.0, output_rate=80.0),
        run("vllm-1p1d", "single", TPOT_p50=40.0, output_rate=20.0),
    )
    reached = {(v.aim.system, v.aim.other): v.reached for v in verdicts(found)}
    assert reached == {
        ("tandem", BEST): 1.5,
        ("tandem", FLOOR): 0.75,
        ("tandem-1p1d", "vllm-1p1d"): 4.0,
        ("tandem-1p1d", "tandem"): 0.95,
    }


def test_aims_of_systems_that_nobody_asked_for_are_not_listed() -> None:
    assert {verdict.aim.other for verdict in verdicts(summary(rates("tandem", 1.0, workload="single")))} == {FLOOR}


def test_an_aim_of_a_system_that_failed_is_listed_as_not_measured() -> None:
    found = summary(rates("tandem", 1.0), run("vllm", "batch", failure="it died"))
    reached = [(verdict.aim.name, verdict.aim.other, verdict.reached) for verdict in verdicts(found)]
    assert reached == [("output rate", BEST, None), ("peak memory", FLOOR, None)]


def test_pictures_are_drawn_from_what_there_is(tmp_path: Path) -> None:
    titles = {workload.key: workload.title for workload in WORKLOADS}
    whole = summary(
        rates("tandem", 6.0),
        rates("vllm", 4.0),
        run("tandem", "burst", ITL_p99=9.0),
        run("vllm", "burst", ITL_p99=90.0),
    )
    names = [path.name for path in draw([whole, Summary("empty")], titles, tmp_path / "new")]
    assert names == ["race-small.svg", "race-burst.svg"]
    text = (tmp_path / "new" / "race-small.svg").read_text()
    assert "vllm" in text
    assert "32x256/64" in text
    again = draw([whole], titles, tmp_path / "again")
    assert [path.read_bytes() for path in again] == [(tmp_path / "new" / name).read_bytes() for name in names]


def test_nothing_measured_draws_nothing(tmp_path: Path) -> None:
    assert draw([Summary("empty")], {}, tmp_path) == []
    assert draw([summary(rates("tandem", 1.0))], {}, tmp_path) == []


@pytest.mark.parametrize(("value", "shown"), [(1234.4, "1234"), (12.345, "12.3"), (0.01234, "0.0123")])
def test_numbers_have_three_digits(value: float, shown: str) -> None:
    assert f"| {shown} |" in markdown(summary(rates("tandem", value)), {}, {})
