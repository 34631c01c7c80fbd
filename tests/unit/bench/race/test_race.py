"""The race over real HTTP against scripted servers: turns, resumption, and systems that fail in the middle."""

import errno
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from bench.race.measure import Gauge, Limits
from bench.race.race import Race, Track
from bench.race.runs import Runs
from bench.race.work import ModelCost
from bench.race.workloads import Batch, Burst, Conversations, Figures, Played, Workload
from tests.unit.bench.race.fake_openai import FakeSystem, Script
from tests.unit.bench.race.test_work import SIZES

BATCH = Batch("batch", "batch", num_requests=4, concurrency=2, own=5, output=3)
PREFILL = Batch("prefill-1", "prefill", 1, 1, 20, 1, repeats=2)
TURNS = Conversations("turns", "turns", users=2, turns=2, first=6, later=2, output=3)
BURST = Burst("burst", "burst", streams=2, stream_prompt=4, stream_output=5, burst=2, burst_prompt=9)
WORKLOADS = (BATCH, PREFILL, TURNS, BURST)


class Raced:
    """A race below a directory, and what it said."""

    def __init__(
        self,
        directory: Path,
        systems: Sequence[FakeSystem],
        workloads: Sequence[Workload] = (BATCH,),
        rounds: int = 1,
        workload_s: float = 200.0,
        at_once: int = 1,
        settings: Mapping[str, Mapping[str, object]] | None = None,
    ) -> None:
        self.said: list[str] = []
        self.runs = Runs(directory, settings or {})
        self.race = Race(systems, workloads, rounds, self.runs, self.said.append, "abc", at_once)
        limits = Limits(request_s=200.0, workload_s=workload_s, floor_repeats=0)
        self.race.prepare()
        self.race.run(Track("small", Path("unused"), Gauge(ModelCost(SIZES), limits)))
        self._by_key = {workload.key: workload for workload in workloads}

    def failures(self) -> dict[tuple[str, str, int], str]:
        """By system, workload and round; "" = measured."""
        found = self.runs.of(list(self.race.slots("small")), self._by_key)
        return {(run.slot.system, run.slot.workload, run.slot.turn): run.failure for run in found}


def started(said: Sequence[str]) -> list[str]:
    return [line for line in said if line.startswith("round")]


def test_systems_take_turns_and_each_round_begins_with_another(tmp_path: Path) -> None:
    raced = Raced(tmp_path, [FakeSystem("a"), FakeSystem("b")], rounds=3)
    names = [line.split(" · ")[2] for line in started(raced.said)]
    assert names == ["a: starting", "b: starting", "b: starting", "a: starting", "a: starting", "b: starting"]
    assert set(raced.failures().values()) == {""}
    assert len(raced.failures()) == 6


def test_those_who_stand_side_by_side_take_turns_at_each_workload(tmp_path: Path) -> None:
    systems = [FakeSystem(name) for name in "abc"]
    raced = Raced(tmp_path, systems, [BATCH, PREFILL], rounds=2, at_once=2)
    names = [line.split(" · ")[2][0] for line in started(raced.said)]
    assert names == [*"ab", *"c", *"c", *"ba"]
    measured = [tuple(line.strip().split(":")[0].split(" · ")) for line in raced.said if line.startswith("  ")]
    side_by_side = [(name, key) for name, key in measured if name != "c"]
    first = [("a", "batch"), ("b", "batch"), ("b", "prefill-1"), ("a", "prefill-1")]
    assert side_by_side[:4] == first
    assert side_by_side[4:] == [("b", "batch"), ("a", "batch"), ("a", "prefill-1"), ("b", "prefill-1")]
    assert all(len(system.apps) == 2 for system in systems)
    assert set(raced.failures().values()) == {""}
    assert not any(system.is_up for system in systems)


def test_one_that_breaks_does_not_disturb_who_stands_beside_it(tmp_path: Path) -> None:
    broken, well = FakeSystem("a", (Script(refuse_from=6), Script())), FakeSystem("b")
    raced = Raced(tmp_path, [broken, well], [BATCH, PREFILL, TURNS], at_once=2)
    failures = raced.failures()
    assert failures.pop(("a", "prefill-1", 0)).endswith("it is broken")
    assert set(failures.values()) == {""}
    assert (len(broken.apps), len(well.apps)) == (2, 1)


def test_both_get_the_same_prompts_and_never_twice(tmp_path: Path) -> None:
    systems = [FakeSystem("a"), FakeSystem("b")]
    Raced(tmp_path, systems, WORKLOADS, rounds=2)
    prompts = [sorted(tuple(body["prompt"]) for app in system.apps for body in app.bodies) for system in systems]
    assert prompts[0] == prompts[1]
    assert len(set(prompts[0])) == len(prompts[0])


def test_every_kind_of_workload_is_measured(tmp_path: Path) -> None:
    raced = Raced(tmp_path, [FakeSystem("a")], WORKLOADS)
    assert set(raced.failures().values()) == {""}
    for workload in WORKLOADS:
        slot = next(slot for slot in raced.race.slots("small") if slot.workload == workload.key)
        run = raced.runs.find(slot, workload)
        assert run is not None
        assert run.measured is not None
        assert run.git_sha == "abc"
        assert run.measured.wall_s > 0
        assert 0 < run.measured.cached_share < 1
        assert {"CPU time", "peak memory"} < run.measured.figures.keys()


def test_a_figure_that_only_some_plays_have_is_the_median_of_those(tmp_path: Path) -> None:
    each = iter(({"output rate": 1.0}, {"output rate": 3.0, "TPOT p50": 5.0}))

    class Uneven(Batch):
        def figures(self, played: Played) -> Figures:
            return next(each)

    system = FakeSystem("a")
    gauge, workload = Gauge(ModelCost(SIZES), Limits(floor_repeats=0)), Uneven("x", "x", 1, 1, 4, 2, repeats=2)
    with system.serve(tmp_path) as served:
        figures = gauge.measure(system, served, workload, "s").figures
    assert (figures["output rate"], figures["TPOT p50"]) == (2.0, 5.0)


def test_an_interrupted_race_goes_on_where_it_stopped(tmp_path: Path) -> None:
    first = FakeSystem("a")
    Raced(tmp_path, [first], [BATCH])
    again = FakeSystem("a")
    Raced(tmp_path, [again], [BATCH, PREFILL])
    asked = {len(body["prompt"]) for app in again.apps for body in app.bodies}
    assert asked == {20}
    nothing = FakeSystem("a")
    Raced(tmp_path, [nothing], [BATCH, PREFILL])
    assert nothing.apps == []


def test_a_system_with_other_settings_is_measured_anew_and_its_neighbours_are_not(tmp_path: Path) -> None:
    for flags, num_starts in (([], (1, 1)), (["--max-running", "4"], (1, 0)), (["--max-running", "4"], (0, 0))):
        systems = [FakeSystem("a"), FakeSystem("b")]
        raced = Raced(tmp_path, systems, settings={"a": {"flags": flags}, "b": {"dtype": "float32"}})
        assert tuple(len(system.apps) for system in systems) == num_starts
        assert raced.failures() == {("a", "batch", 0): "", ("b", "batch", 0): ""}
        (slot, _) = raced.race.slots("small")
        run = raced.runs.find(slot, BATCH)
        assert run is not None
        assert run.definition["flags"] == flags


def test_ctrl_c_keeps_what_was_measured(tmp_path: Path) -> None:
    class Interrupted(Gauge):
        num_measured = 0

        def measure(self, *arguments: object) -> object:  # type: ignore[override]
            self.num_measured += 1
            if self.num_measured == 2:
                raise KeyboardInterrupt
            return super().measure(*arguments)  # type: ignore[arg-type]

    system = FakeSystem("a")
    race = Race([system], [BATCH, PREFILL], 1, Runs(tmp_path), lambda line: None)
    with pytest.raises(KeyboardInterrupt):
        race.run(Track("small", Path("unused"), Interrupted(ModelCost(SIZES), Limits(floor_repeats=0))))
    assert not system.is_up
    (first, second) = race.slots("small")
    assert Runs(tmp_path).has(first, BATCH)
    assert Runs(tmp_path).find(second, PREFILL) is None


def test_a_system_that_breaks_in_the_middle_is_started_anew_for_the_rest(tmp_path: Path) -> None:
    """Its first start answers 6 requests (a batch and its warm-up), then nothing but errors."""
    broken, well = FakeSystem("a", (Script(refuse_from=6), Script())), FakeSystem("b")
    raced = Raced(tmp_path, [broken, well], [BATCH, PREFILL, TURNS])
    failures = raced.failures()
    assert failures.pop(("a", "prefill-1", 0)).endswith("it is broken")
    assert set(failures.values()) == {""}
    assert len(failures) == 5
    assert len(broken.apps) == 2
    assert any("FAILED" in line and "it is broken" in line for line in raced.said)


def test_a_failure_is_tried_again_by_the_next_race(tmp_path: Path) -> None:
    Raced(tmp_path, [FakeSystem("a", (Script(extra_tokens=1),))])
    raced = Raced(tmp_path, [FakeSystem("a")])
    assert raced.failures() == {("a", "batch", 0): ""}


def test_wrong_lengths_fail_the_row_loudly(tmp_path: Path) -> None:
    raced = Raced(tmp_path, [FakeSystem("a", (Script(extra_tokens=-1),))])
    assert "usage says 2 of 3" in raced.failures()["a", "batch", 0]


def test_conversations_need_token_ids(tmp_path: Path) -> None:
    raced = Raced(tmp_path, [FakeSystem("a", (Script(tells_ids=False),))], [BATCH, TURNS])
    assert raced.failures()["a", "batch", 0] == ""
    assert "no token ids" in raced.failures()["a", "turns", 0]


def test_a_system_that_does_not_answer_costs_its_time_only(tmp_path: Path) -> None:
    raced = Raced(tmp_path, [FakeSystem("a", (Script(hold_after=1), Script()))], [BATCH, PREFILL], workload_s=3.0)
    assert raced.failures() == {("a", "batch", 0): "TimeoutError", ("a", "prefill-1", 0): ""}


def test_one_that_cannot_start_loses_its_round(tmp_path: Path) -> None:
    broken = FakeSystem("a", fails_to_start="no such library")
    raced = Raced(tmp_path, [broken, FakeSystem("b")], [BATCH, PREFILL])
    failures = raced.failures()
    assert failures["a", "batch", 0] == failures["a", "prefill-1", 0] == "no such library"
    assert failures["b", "batch", 0] == ""


def test_one_that_is_not_to_be_had_is_left_out(tmp_path: Path) -> None:
    absent = FakeSystem("a", absent="no compiler")
    raced = Raced(tmp_path, [absent, FakeSystem("b")], rounds=2)
    assert raced.race.absent == {"a": "no compiler"}
    assert absent.apps == []
    assert {system for system, _, _ in raced.failures()} == {"b"}


def test_an_error_of_an_installation_leaves_it_out(tmp_path: Path) -> None:
    class Failing(FakeSystem):
        def prepare(self) -> None:
            raise OSError(errno.ENOSPC, "no space left")

    raced = Raced(tmp_path, [Failing("a"), FakeSystem("b")])
    assert "no space left" in raced.race.absent["a"]
    assert raced.failures() == {("b", "batch", 0): ""}


def test_a_long_error_shows_its_end(tmp_path: Path) -> None:
    raced = Raced(tmp_path, [FakeSystem("a", fails_to_start="x" * 5000 + " the reason")])
    failure = raced.failures()["a", "batch", 0]
    assert failure.endswith("the reason")
    assert len(failure) < 700
