"""Times of one answer, and what many of them make."""

import pytest

from bench.race.answer import Answer, Gap, gap_figures, median_ttft_ms, merged, tpot_figures, wall_s


def answer(*arrivals: tuple[float, int], sent_s: float = 10.0, num_output: int | None = None) -> Answer:
    return Answer(sent_s, arrivals, 4, num_output or sum(count for _, count in arrivals))


def test_the_first_event_ends_the_wait_and_the_last_ends_the_answer() -> None:
    one = answer((10.5, 1), (10.6, 1), (10.9, 1))
    assert one.ttft_s == pytest.approx(0.5)
    assert one.ended_s == 10.9
    assert one.tpot_s == pytest.approx(0.2)


def test_tokens_of_the_first_event_took_no_time_of_their_own() -> None:
    """They are told with the first one; counting them would make an answer in two events look fast."""
    assert answer((10.5, 3), (10.9, 2)).tpot_s == pytest.approx(0.2)


def test_an_answer_in_one_event_has_no_time_a_token() -> None:
    one = answer((10.5, 8))
    assert one.tpot_s is None
    assert not list(one.gaps())
    assert tpot_figures([one]) == {}
    assert tpot_figures([one, answer((10.5, 1), (10.9, 2))]) == pytest.approx({"TPOT p50": 200.0})


def test_a_gap_is_that_of_all_tokens_it_brought() -> None:
    gaps = list(answer((10.0, 1), (10.4, 4)).gaps())
    assert gaps == [Gap(10.0, 10.4, 4)]
    assert gap_figures(gaps) == pytest.approx({"ITL p50": 100.0, "ITL p99": 400.0})


def test_a_server_that_does_not_count_is_taken_to_send_evenly() -> None:
    """Three events say one token each; usage says nine."""
    one = answer((10.0, 1), (10.4, 1), (10.8, 1), num_output=9)
    assert [gap.num_tokens for gap in one.gaps()] == [4.0, 4.0]
    assert one.tpot_s == pytest.approx(0.1)
    assert gap_figures(list(one.gaps()))["ITL p50"] == pytest.approx(100.0)


def test_a_server_that_does_not_count_and_sends_one_event() -> None:
    assert answer((10.0, 1), num_output=9).tpot_s is None


def test_events_at_once_are_one_event() -> None:
    """A server that sends tokens in pairs had half of its gaps at next to nothing, and a median of 0.05 ms."""
    pairs = [(10.0 + 0.04 * n + late_s, 1) for n in range(10) for late_s in (0.0, 0.0005)]
    together = merged(pairs)
    assert together == tuple((10.0 + 0.04 * n, 2) for n in range(10))
    assert gap_figures(list(answer(*together).gaps())) == pytest.approx({"ITL p50": 20.0, "ITL p99": 40.0})


def test_events_a_millisecond_apart_are_several() -> None:
    events = [(10.0 + 0.0011 * n, 1) for n in range(10)]
    assert merged(events) == tuple(events)


def test_percentiles_are_gaps_that_occurred() -> None:
    gaps = [Gap(0.0, 0.001 * n, 1) for n in range(1, 201)]
    assert gap_figures(gaps) == pytest.approx({"ITL p50": 100.0, "ITL p99": 198.0})
    assert gap_figures([]) == {}


def test_medians_and_the_wall() -> None:
    answers = [answer((10.0 + 0.1 * n, 1), (12.0 + n, 1)) for n in (1, 2, 9)]
    assert median_ttft_ms(answers) == pytest.approx(200.0)
    assert wall_s(answers) == pytest.approx(11.0)
