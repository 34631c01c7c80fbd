"""Forecasts from windows of traffic: tokens as well as requests."""

import pytest

from tandem.planning.capacity import OfferedLoad
from tandem.planning.demand import Demand
from tandem.planning.forecast import ForecastSettings
from tandem.planning.observation import Traffic


def _observed(*windows: tuple[int, int]) -> Demand:
    """Windows of 10 s: requests, and the tokens of each one's prompt, a quarter of which is in a cache."""
    demand = Demand(ForecastSettings())
    for number, (num_requests, num_prompt) in enumerate(windows, start=1):
        traffic = Traffic(
            duration_s=10.0,
            num_requests=num_requests,
            num_prompt_tokens=num_requests * num_prompt,
            num_cached_tokens=num_requests * num_prompt // 4,
        )
        demand.observe(traffic, 10.0 * number)
    return demand


def _missing_per_s(load: OfferedLoad) -> float:
    return load.requests_per_s * load.num_missing_tokens


@pytest.mark.parametrize("factor", [4, 16])
def test_a_burst_of_long_prompts_is_borne_although_their_mean_length_hides_it(factor: int) -> None:
    """Its tokens were cut at the mean length of five minutes: a queue of minutes grew before a worker was asked for."""
    demand = _observed(*[(100, 500)] * 60, *[(100, factor * 500)] * 2)
    arrived_per_s = 100 * factor * 500 * 3 / 4 / 10
    assert _missing_per_s(demand.at_most(70.0)) >= 0.999 * arrived_per_s
    assert _missing_per_s(demand.arriving(70.0)) >= 0.999 * arrived_per_s
    assert demand.at_most(70.0).num_prompt_tokens >= demand.at_most(70.0).num_missing_tokens


@pytest.mark.parametrize("num_quiet", [5, 40])
def test_hardly_any_requests_are_not_said_to_be_of_any_length(num_quiet: int) -> None:
    """The margin of tokens over their forecast was learned when there were many requests: over few it is no length."""
    varied = [(100, 500 if number % 20 < 10 else 8000) for number in range(90)]
    load = _observed(*varied, *[(1, 1000)] * num_quiet).at_most(70.0)
    assert load.num_missing_tokens <= 8000
