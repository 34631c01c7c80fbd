"""Forecasts: level, trend and margin of series whose future is known."""

import random

import pytest

from tandem.core.errors import ConfigurationError
from tandem.planning.forecast import Forecast, ForecastSettings


def _fed(values: list[float], step_s: float = 10.0) -> Forecast:
    forecast = Forecast()
    for number, value in enumerate(values, 1):
        forecast.observe(number * step_s, step_s, value)
    return forecast


def test_nothing_known_is_nothing_expected() -> None:
    expected = Forecast().expect(60.0)
    assert (expected.level, expected.mean, expected.upper) == (0.0, 0.0, 0.0)


def test_a_steady_series_stays() -> None:
    expected = _fed([5.0] * 60).expect(120.0)
    assert (expected.level, expected.mean, expected.upper) == (5.0, 5.0, 5.0)


def test_little_knowledge_is_met_with_a_margin_that_grows_with_the_horizon() -> None:
    forecast = _fed([5.0] * 2)
    near, far = forecast.expect(10.0), forecast.expect(240.0)
    assert near.mean == far.mean == 5.0
    assert 5.0 < near.upper < far.upper


def test_a_ramp_is_followed_to_the_horizon() -> None:
    values = [10.0 + 0.5 * number for number in range(40)]
    expected = _fed(values).expect(100.0)
    assert expected.level < values[-1]
    assert expected.mean == pytest.approx(expected.level + 0.05 * 100.0)
    assert expected.upper >= expected.mean


def test_noise_has_no_trend() -> None:
    source = random.Random(0)
    values = [10.0 + source.gauss(0.0, 1.5) for _ in range(90)]
    expected = _fed(values).expect(120.0)
    assert expected.mean == pytest.approx(expected.level, rel=0.05)


def test_a_jump_is_seen_within_two_windows() -> None:
    expected = _fed([10.0] * 30 + [20.0] * 2).expect(10.0)
    assert expected.level == pytest.approx(20.0)
    assert expected.upper >= 20.0


def test_one_window_of_noise_is_no_jump() -> None:
    source = random.Random(1)
    values = [10.0 + source.gauss(0.0, 2.0) for _ in range(60)]
    expected = _fed([*values, 13.0]).expect(10.0)
    assert expected.level < 13.0


def test_what_exceeded_forecasts_before_may_do_so_again() -> None:
    """A burst of half a minute every four: the margin covers it at horizons that reach one."""
    values = [20.0 if number % 24 < 6 else 10.0 for number in range(88)]
    forecast = _fed(values)
    assert forecast.expect(240.0).upper > 18.0
    assert forecast.expect(240.0).mean < 13.0


def test_a_known_ramp_needs_no_margin() -> None:
    expected = _fed([10.0 + 0.1 * number for number in range(90)]).expect(60.0)
    assert expected.upper == pytest.approx(expected.mean, rel=0.02)


def test_the_past_is_bounded_and_windows_come_in_order() -> None:
    forecast = _fed([100.0] * 10 + [1.0] * 200)
    assert forecast.expect(600.0).upper == pytest.approx(1.0)
    forecast.observe(5.0, 10.0, 1e9)
    forecast.observe(1e6, 0.0, 1e9)
    assert forecast.expect(0.0).level == pytest.approx(1.0)


def test_windows_may_differ_in_length() -> None:
    forecast = Forecast()
    forecast.observe(5.0, 5.0, 10.0)
    forecast.observe(20.0, 15.0, 2.0)
    assert forecast.expect(0.0).level == pytest.approx(4.0)


@pytest.mark.parametrize("gap_s", [41.0, 60.0, 90.0, 120.0])
def test_a_gap_in_what_was_observed_tells_nothing_of_errors(gap_s: float) -> None:
    forecast = _fed([5.0] * 60)
    forecast.observe(600.0 + gap_s, 10.0, 5.0)
    expected = forecast.expect(70.0)
    assert (expected.level, expected.mean, expected.upper) == (5.0, 5.0, 5.0)


def test_windows_longer_than_the_horizon_leave_the_first_margin() -> None:
    expected = _fed([5.0] * 60, step_s=10.003).expect(10.0)
    assert expected.upper == pytest.approx(5.5)


def test_settings_that_contradict_themselves_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="quick_s"):
        ForecastSettings(quick_s=100.0)
    with pytest.raises(ConfigurationError, match="share"):
        ForecastSettings(share=1.0)
