"""The last minute: whole seconds only, percentiles within five percent, nothing older, nothing unbounded."""

import pytest

from tandem.core.clock import ManualClock
from tandem.gateway.recent import WINDOW_S, Recent


def test_nothing_happened() -> None:
    clock = ManualClock(100.5)
    told = Recent(clock).as_json()
    assert told["window_s"] == 0
    assert told["requests_per_s"] == 0.0
    assert told["ttft_ms"] == {"p50": None, "p95": None, "p99": None}


def test_the_running_second_is_told_when_it_is_over() -> None:
    clock = ManualClock(100.0)
    recent = Recent(clock)
    recent.note_arrival(30)
    clock.advance(0.9)
    assert recent.as_json()["num_requests"] == 0
    clock.advance(0.2)
    assert recent.as_json()["num_requests"] == 1
    assert recent.as_json()["prompt_tokens_per_s"] == 30.0


def test_rates_are_means_over_quiet_seconds_too() -> None:
    clock = ManualClock(10.0)
    recent = Recent(clock)
    for _ in range(4):
        recent.note_arrival(1)
    recent.note_first(0.1)
    recent.note_tokens(7, 0.7)
    clock.advance(4.0)
    told = recent.as_json()
    assert told["window_s"] == 4
    assert (told["requests_per_s"], told["output_tokens_per_s"]) == (1.0, 2.0)
    assert told["series"]["requests_per_s"] == [4, 0, 0, 0]
    assert told["series"]["tpot_p50_ms"][1:] == [None, None, None]


@pytest.mark.parametrize("seconds", [0.0004, 0.02, 0.15, 3.7, 90.0])
def test_a_percentile_is_off_by_five_percent_at_most(seconds: float) -> None:
    clock = ManualClock()
    recent = Recent(clock)
    recent.note_first(seconds)
    recent.note_tokens(3, 3 * seconds)
    clock.advance(1.0)
    told = recent.as_json()
    assert told["ttft_ms"]["p99"] == pytest.approx(1000 * seconds, rel=0.051)
    assert told["tpot_ms"]["p50"] == pytest.approx(1000 * seconds, rel=0.051)


def test_percentiles_are_of_the_whole_window() -> None:
    clock = ManualClock()
    recent = Recent(clock)
    for hundredths in range(1, 101):
        recent.note_first(hundredths / 100)
        clock.advance(0.5)
    clock.advance(1.0)
    told = recent.as_json()["ttft_ms"]
    assert told["p50"] == pytest.approx(500, rel=0.06)
    assert told["p95"] == pytest.approx(950, rel=0.06)


def test_what_is_older_than_the_window_is_forgotten_and_memory_stays_small() -> None:
    clock = ManualClock()
    recent = Recent(clock)
    for _ in range(10 * WINDOW_S):
        recent.note_arrival(1)
        recent.note_first(0.01)
        clock.advance(1.0)
    assert recent.as_json()["num_requests"] == WINDOW_S
    clock.advance(WINDOW_S)
    told = recent.as_json()
    assert (told["num_requests"], told["ttft_ms"]["p50"]) == (0, None)
    assert len(told["series"]["requests_per_s"]) == WINDOW_S
