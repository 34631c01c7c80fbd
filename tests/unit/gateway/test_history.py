"""The ring of recent requests: bounded, in order, with each choice's stages."""

import time

import pytest

from tandem.core.clock import ManualClock
from tandem.core.timeline import Stage
from tandem.core.types import FinishReason
from tandem.gateway.history import MAX_STAGES, RequestHistory
from tandem.gateway.request import ChoiceEnd


def end(index: int, *stages: Stage) -> ChoiceEnd:
    return ChoiceEnd(index, FinishReason.STOP, 3, 4, 1, 0.5, None, stages)


def test_the_oldest_is_forgotten_first() -> None:
    history = RequestHistory(2)
    for name in ("a", "b", "c"):
        history.open(name, "m", 1.0)
    assert history.find("a") is None
    assert history.find("c") is not None


def test_an_answer_finds_its_request_until_that_is_forgotten() -> None:
    history = RequestHistory(2)
    for name in ("a", "b"):
        history.name(history.open(name, "m", 1.0), f"resp_{name}")
    found = history.find("resp_a")
    assert found is not None
    assert found.request_id == "a"
    history.open("a", "m", 2.0)
    assert history.find("resp_a") is None
    history.name(found, "resp_late")
    assert history.find("resp_late") is None
    history.open("c", "m", 1.0)
    assert history.find("resp_b") is None


def test_a_whole_timeline_replaces_what_came_early_and_stages_are_in_order() -> None:
    record = RequestHistory().open("a", "m", 1.0)
    record.num_choices = 2
    early = Stage("queue", "d", 3.0, 0.1)
    record.add_early(0, [early])
    record.add_early(1, [early])
    record.add(Stage("pair", "gateway", 1.0, 0.1))
    record.end_choice(end(0, Stage("prefill", "d", 2.0, 0.2), early))
    names = [(stage.name, stage.attributes.get("choice")) for stage in record.stages()]
    assert names == [("pair", None), ("prefill", 0), ("queue", 0), ("queue", 1)]
    found = record.as_json()
    assert (found["prompt_tokens"], found["num_failovers"], found["ttft_s"]) == (3, 1, 0.5)
    assert found["choices"][0]["finish_reason"] == "stop"


def test_the_first_word_on_its_end_counts_and_stages_are_bounded() -> None:
    clock = ManualClock(7.0)
    record = RequestHistory(clock=clock).open("a", "m", 1.0)
    clock.advance(2.5)
    record.close("done")
    clock.advance(1.0)
    record.close("error", "later")
    assert (record.state, record.error, record.duration_s) == ("done", None, 2.5)
    for _ in range(MAX_STAGES + 1):
        record.add(Stage("x", "gateway", 1.0, 0.0))
        record.add_early(0, [Stage("y", "d", 1.0, 0.0)])
    assert len(record.stages()) == 2 * MAX_STAGES


def test_what_records_hold_is_bounded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.gateway.history.MAX_PARTS", 100)
    history, stage = RequestHistory(), Stage("x", "d", 1.0, 0.0)
    for number in range(10):
        record = history.open(f"wide {number}", "m", 1.0)
        for index in range(16):
            record.add_early(index, [stage])
            record.end_choice(end(index, stage, stage))
        assert record.num_parts == 48
    kept = [number for number in range(10) if history.find(f"wide {number}") is not None]
    assert kept == [7, 8, 9], "two were kept beside the latest when that was opened"
    forgotten = history.find("wide 8")
    assert forgotten is not None
    for number in range(99):
        history.open(f"narrow {number}", "m", 1.0).add(stage)
    assert history.find("wide 8") is None
    assert history.find("narrow 0") is not None
    for _ in range(9):
        forgotten.add(stage)
    history.open("next", "m", 1.0)
    assert history.find("narrow 0") is not None, "what is added to a forgotten one does not count"


def test_a_wall_clock_set_back_spoils_no_duration(monkeypatch: pytest.MonkeyPatch) -> None:
    wall_s, clock = 1e9, ManualClock()
    monkeypatch.setattr(time, "time", lambda: wall_s)
    record = RequestHistory(clock=clock).open("a", "m", time.time())
    with record.timed("pair"):
        clock.advance(0.5)
        wall_s -= 3600.0
    record.close("done")
    assert record.stages() == [Stage("pair", "gateway", 1e9, 0.5)]
    assert record.duration_s == 0.5
