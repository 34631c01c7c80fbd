"""The search for pool sizes against trying every pair."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.planning.capacity import DecodeCapacity, OfferedLoad, PrefillCapacity
from tandem.planning.pools import Prospect
from tests.unit.planning.loop import SETTINGS, SPEED


def _prospect(rate: float, backlog_ms: float = 0.0) -> Prospect:
    load = OfferedLoad(
        requests_per_s=rate, num_prompt_tokens=4000.0, num_missing_tokens=3000.0, num_output_tokens=400.0
    )
    return Prospect(
        SETTINGS,
        load,
        PrefillCapacity(SPEED.prefill, 1.0, 0.95),
        DecodeCapacity(SPEED.decode, 400_000, 256, 1.0, 0.95),
        backlog_ms=backlog_ms,
    )


@given(st.floats(0.1, 150.0))
def test_what_is_needed_is_enough_and_nothing_less_is(rate: float) -> None:
    prospect = _prospect(rate)
    num_prefill, num_decode = prospect.prefill_need(), prospect.decode_need()
    assert prospect.outlook(num_prefill, num_decode).meets_slo
    if num_prefill > 1:
        fewer = prospect.outlook(num_prefill - 1, num_decode)
        assert fewer.prefill_use > SETTINGS.max_use or fewer.ttft_ms > 0.9 * SETTINGS.ttft_ms
    if num_decode > 1:
        fewer = prospect.outlook(num_prefill, num_decode - 1)
        assert fewer.decode_use > SETTINGS.max_use or fewer.tpot_ms > SETTINGS.tpot_ms


@given(st.floats(0.1, 150.0), st.floats(0.5, 1.0))
def test_comfort_asks_for_as_many_or_more(rate: float, comfort: float) -> None:
    prospect = _prospect(rate)
    assert prospect.prefill_need(comfort) >= prospect.prefill_need()
    assert prospect.decode_need(comfort) >= prospect.decode_need()


@settings(max_examples=40, deadline=None)
@given(st.floats(1.0, 150.0), st.integers(2, 14))
def test_a_budget_is_spent_as_trying_every_pair_would(rate: float, budget: int) -> None:
    prospect = _prospect(rate)
    found = prospect.best_within(budget)
    every = [(p, d) for p in range(1, budget) for d in range(1, budget) if p + d <= budget]
    assert sum(found) <= budget
    assert prospect.strain(*found)[0] == pytest.approx(min(prospect.strain(*pair)[0] for pair in every))


@pytest.mark.parametrize("rate", [0.0, 10.0, 80.0])
def test_a_step_that_takes_too_long_alone_is_no_reason_for_more_workers(rate: float) -> None:
    """One over the objective asked for the largest pool, even without traffic; one within a hair kept it for ever."""
    prospect = _prospect(rate)
    alone_ms = prospect.alone_ms

    def need(tpot_ms: float, comfort: float) -> int:
        return replace(prospect, settings=replace(SETTINGS, tpot_ms=tpot_ms)).decode_need(comfort)

    assert need(0.99 * alone_ms, 1.0) == need(math.inf, 1.0)
    assert need(0.99 * alone_ms, 0.95) == need(math.inf, 0.95)
    assert need(1.04 * alone_ms, 0.95) == max(need(1.04 * alone_ms, 1.0), need(math.inf, 0.95))


def test_pools_that_cannot_keep_up_are_compared_by_how_far_they_fall_behind() -> None:
    prospect = _prospect(500.0)
    assert math.isinf(prospect.outlook(2, 2).ttft_ms)
    assert prospect.strain(3, 2) < prospect.strain(2, 2)


@pytest.mark.parametrize("num_decode", [1, 3, 6])
def test_more_demand_is_more_strain(num_decode: int) -> None:
    """Just below the load at which no steady state exists, a batch that grows without bound counted a hundredfold."""
    strains = [_prospect(rate / 2).strain(500, num_decode)[0] for rate in range(1, 400)]
    assert strains == sorted(strains)
    assert strains[-1] < 1e8


def test_a_backlog_must_be_worked_off_in_time() -> None:
    calm, late = _prospect(10.0), _prospect(10.0, backlog_ms=90_000.0)
    assert late.prefill_need() >= calm.offered + 90.0 / SETTINGS.drain_s
    assert late.ttft_ms(calm.prefill_need()) > calm.ttft_ms(calm.prefill_need())
    assert late.ttft_ms(late.prefill_need()) == pytest.approx(calm.ttft_ms(late.prefill_need()), abs=1.0)


def test_slower_workers_than_their_speed_says_are_needed_in_numbers() -> None:
    prospect = _prospect(30.0)
    assert replace(prospect, pace=0.5).offered == pytest.approx(2 * prospect.offered)
    assert replace(prospect, pace=0.5).prefill_need() > prospect.prefill_need()
