"""Slope of a soak's readings: of the last half alone, with its standard error."""

import math

import pytest

from bench.soak import Sample, slope


def read(num_requests: int, rss_mb: float) -> Sample:
    return Sample(num_requests, 0.0, int(rss_mb * 1e6), 0, 0, 0)


def test_the_first_half_does_not_count() -> None:
    rising = [read(1000 * number, 10.0 * number) for number in range(50)]
    flat = [read(1000 * number, 500.0) for number in range(50, 101)]
    assert slope(rising + flat) == (0.0, 0.0)


def test_a_slope_is_in_megabytes_for_ten_thousand_requests() -> None:
    gradient, error = slope([read(1000 * number, 100 + 0.2 * number + number % 2) for number in range(101)])
    assert gradient == pytest.approx(2.0, abs=3 * error)
    assert 0 < error < 0.1


def test_two_readings_have_no_slope() -> None:
    assert all(map(math.isnan, slope([read(0, 1.0), read(100, 1.0)])))
