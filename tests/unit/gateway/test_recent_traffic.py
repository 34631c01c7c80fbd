"""The last minute and hour: whole seconds only, percentiles within five percent, nothing older, nothing unbounded."""

import tracemalloc

import pytest

from tandem.core.clock import ManualClock
from tandem.gateway.recent_traffic import NUM_MINUTES, NUM_SECONDS, RecentTraffic


def test_nothing_happened() -> None:
    clock = ManualClock(100.5)
    told = RecentTraffic(clock).as_json()
    assert told["window_s"] == 0
    assert told["requests_per_s"] == 0.0
    assert told["ttft_ms"] == {"p50": None, "p95": None, "p99": None}


def test_the_running_second_is_told_when_it_is_over() -> None:
    clock = ManualClock(100.0)
    recent = RecentTraffic(clock)
    recent.note_arrival(30)
    clock.advance(0.9)
    assert recent.as_json()["num_requests"] == 0
    clock.advance(0.2)
    assert recent.as_json()["num_requests"] == 1
    assert recent.as_json()["prompt_tokens_per_s"] == 30.0


def test_rates_are_means_over_quiet_seconds_too() -> None:
    clock = ManualClock(10.0)
    recent = RecentTraffic(clock)
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
    recent = RecentTraffic(clock)
    recent.note_first(seconds)
    recent.note_tokens(3, 3 * seconds)
    clock.advance(1.0)
    told = recent.as_json()
    assert told["ttft_ms"]["p99"] == pytest.approx(1000 * seconds, rel=0.051)
    assert told["tpot_ms"]["p50"] == pytest.approx(1000 * seconds, rel=0.051)


def test_percentiles_are_of_the_whole_window() -> None:
    clock = ManualClock()
    recent = RecentTraffic(clock)
    for hundredths in range(1, 101):
        recent.note_first(hundredths / 100)
        clock.advance(0.5)
    clock.advance(1.0)
    told = recent.as_json()["ttft_ms"]
    assert told["p50"] == pytest.approx(500, rel=0.06)
    assert told["p95"] == pytest.approx(950, rel=0.06)


def test_what_is_older_than_the_window_is_forgotten_and_memory_stays_small() -> None:
    clock = ManualClock()
    recent = RecentTraffic(clock)
    for _ in range(10 * NUM_SECONDS):
        recent.note_arrival(1)
        recent.note_first(0.01)
        clock.advance(1.0)
    assert recent.as_json()["num_requests"] == NUM_SECONDS
    clock.advance(NUM_SECONDS)
    told = recent.as_json()
    assert (told["num_requests"], told["ttft_ms"]["p50"]) == (0, None)
    assert len(told["series"]["requests_per_s"]) == NUM_SECONDS


def test_errors_are_a_share_of_what_was_asked() -> None:
    """A request that is refused before it arrives is asked for as well; one that fails later is not counted twice."""
    clock = ManualClock()
    recent = RecentTraffic(clock)
    for _ in range(5):
        recent.note_arrival(10)
    recent.note_error(is_ours=True, has_arrived=True)
    recent.note_error(is_ours=False, has_arrived=False)
    recent.note_error(is_ours=False, has_arrived=False)
    recent.note_error(is_ours=False, has_arrived=False)
    clock.advance(2.0)
    told = recent.as_json()
    assert (told["num_failed"], told["num_refused"]) == (1, 3)
    assert (told["failed_share"], told["refused_share"]) == (0.125, 0.375)
    assert told["series"]["failed_share"] == [0.125, None]


def test_the_cached_share_is_of_tokens_and_not_of_requests() -> None:
    clock = ManualClock()
    recent = RecentTraffic(clock)
    recent.note_prompt(900, 810)
    recent.note_prompt(100, 0)
    clock.advance(1.0)
    told = recent.as_json()
    assert told["cached_share"] == 0.81
    assert told["series"]["cached_share"] == [0.81]


def test_the_hour_has_a_value_a_minute_and_the_running_minute_is_of_the_seconds_that_are_over() -> None:
    clock = ManualClock(630.0)
    recent = RecentTraffic(clock)
    for _ in range(105):
        recent.note_arrival(1)
        recent.note_first(0.1)
        clock.advance(1.0)
    told = recent.hour_as_json()
    assert (told["window_s"], told["step_s"], told["num_requests"]) == (105, 60, 105)
    assert told["series"]["requests_per_s"] == [1.0, 1.0, 1.0]
    assert told["ttft_ms"]["p99"] == pytest.approx(100, rel=0.06)
    clock.advance(30.0)
    assert recent.hour_as_json()["series"]["requests_per_s"] == [1.0, 1.0, 0.33]


def test_a_quiet_minute_is_in_the_hour_and_an_older_one_is_not() -> None:
    clock = ManualClock(0.0)
    recent = RecentTraffic(clock)
    recent.note_arrival(1)
    clock.advance(59 * 60.0)
    told = recent.hour_as_json()
    assert told["num_requests"] == 1
    assert told["series"]["requests_per_s"] == [0.02, *[0.0] * 58]
    assert told["series"]["ttft_p50_ms"] == [None] * 59
    clock.advance(61.0)
    told = recent.hour_as_json()
    assert (told["num_requests"], len(told["series"]["requests_per_s"])) == (0, NUM_MINUTES)


def test_hours_of_anything_take_a_bounded_amount_of_memory() -> None:
    """Durations that span every step, in each second of an hour: what the docstring promises is kept."""
    clock = ManualClock()
    recent = RecentTraffic(clock)
    durations = [10 ** (power / 25) for power in range(-150, 150)]
    tracemalloc.start()
    for _ in range(60 * 62):
        for duration_s in durations[:: len(durations) // 10]:
            recent.note_first(duration_s)
        durations.append(durations.pop(0))
        clock.advance(1.0)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size < 4 << 20
    assert len(recent.hour_as_json()["series"]["ttft_p50_ms"]) == NUM_MINUTES
