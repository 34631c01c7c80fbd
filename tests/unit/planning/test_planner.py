"""The planner in a closed loop: it settles, grows in time, shrinks safely, keeps its budget, says what it cannot do."""

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.core.errors import ConfigurationError
from tandem.planning.observation import Plan
from tandem.planning.planner import Holding, ReplicaNeed, SloPlanner
from tandem.planning.planner_settings import PlannerConfig
from tests.unit.planning.loop import SETTINGS, SPEED, Loop, changes, noisy, observation, pool, traffic

SERVICE_S = SPEED.prefill.prompt_ms(4000, 1000) / 1000


def _after(plan: Plan) -> float:
    assert plan.then is not None
    return plan.then.ttft_ms


@settings(deadline=None, max_examples=12)
@given(st.floats(0.2, 150.0), st.sampled_from([0.0, 30.0, 120.0]), st.integers(1, 20), st.integers(1, 20))
def test_a_constant_load_settles(rate: float, startup_s: float, num_prefill: int, num_decode: int) -> None:
    """At most one change once the first risings are known; no 2-1-2 (dynamo#9294)."""
    loop = Loop(SloPlanner(SETTINGS), lambda now_s: rate, startup_s, (num_prefill, num_decode))
    sizes = loop.run(300)
    assert changes(sizes[120:]) <= 1
    last = loop.plans[-1]
    assert last.then is not None
    assert last.then.meets_slo
    assert not last.warnings


@pytest.mark.parametrize(("rate", "seed"), [(3.0, 0), (17.0, 1), (41.0, 2), (58.8, 3)])
def test_noise_moves_little(rate: float, seed: int) -> None:
    """Two hours of steady Poisson arrivals: a handful of changes, and hardly ever one taken back."""
    sizes = Loop(SloPlanner(SETTINGS), noisy(rate, seed), 60.0, (4, 4)).run(720)[90:]
    assert changes(sizes) <= 8
    for pool_sizes in zip(*sizes, strict=True):
        grown = sum(later > earlier for earlier, later in itertools.pairwise(pool_sizes))
        assert grown <= 3


@pytest.mark.parametrize(("startup_s", "num_growing"), [(0.0, 0), (60.0, 4), (120.0, 10)])
def test_a_jump_is_met_at_once_and_asked_for_once(startup_s: float, num_growing: int) -> None:
    """Replicas that are starting are not asked for again while the queue still grows, for `num_growing` windows.

    The second window shows the whole jump. From then on the pool keeps its size until the hold has passed.
    """
    loop = Loop(SloPlanner(SETTINGS), lambda now_s: 10.0 if now_s < 900 else 40.0, startup_s, (3, 3))
    sizes = [num for num, _ in loop.run(150)]
    needed, whole = math.ceil(40.0 * SERVICE_S / SETTINGS.max_use), 90
    grows = [later > earlier for earlier, later in itertools.pairwise(loop.queues_ms[whole:])]
    assert grows == [True] * num_growing + [False] * (len(grows) - num_growing)
    assert sizes[whole - 2] < needed
    assert sizes[whole] > needed if num_growing else sizes[whole] == needed
    assert sizes[whole : whole + 18] == [sizes[whole]] * 18
    assert max(sizes) == sizes[whole]
    assert min(sizes[whole:]) >= needed
    assert loop.queued_ms == 0.0


def test_longer_start_up_is_met_with_more_foresight() -> None:
    """A ramp: with two minutes to start, replicas are asked for earlier, and the queue never grows."""

    def ramp(startup_s: float) -> Loop:
        return Loop(SloPlanner(SETTINGS), lambda now_s: 8.0 + max(0.0, now_s - 900) / 100, startup_s, (2, 2))

    quick, slow = ramp(0.0), ramp(120.0)
    pairs = list(zip(quick.run(200), slow.run(200), strict=True))[100:]
    assert all(late[0] >= soon[0] for soon, late in pairs)
    assert any(late[0] > soon[0] for soon, late in pairs)
    assert slow.queued_ms == 0.0


def test_shrinking_waits_and_leaves_enough() -> None:
    loop = Loop(SloPlanner(SETTINGS), lambda now_s: 30.0 if now_s < 600 else 10.0, 60.0, (6, 6))
    sizes = loop.run(300)
    before, least = sizes[58][0], min(num for num, _ in sizes)
    assert all(num >= before for num, _ in sizes[60:75]), "not within the hold"
    assert sizes[-1][0] < before
    assert least * SETTINGS.max_use * SETTINGS.comfort >= 10.0 * SERVICE_S


def test_a_long_start_up_makes_shrinking_more_patient() -> None:
    needed = math.ceil(30.0 * SERVICE_S / SETTINGS.max_use)

    def first_shrink(startup_s: float) -> int:
        sizes = Loop(SloPlanner(SETTINGS), lambda now_s: 30.0 if now_s < 900 else 5.0, startup_s, (6, 6)).run(300)
        return next(number for number in range(90, 300) if sizes[number][0] < needed)

    assert first_shrink(300.0) >= first_shrink(10.0) + 25


def test_a_regretted_shrinking_is_not_soon_repeated() -> None:
    """Bursts a little rarer than the hold: each shrinking that had to be taken back doubles the patience."""
    loop = Loop(SloPlanner(SETTINGS), lambda now_s: 25.0 if now_s % 400 < 40 else 5.0, 0.0, (2, 2))
    sizes = [num for num, _ in loop.run(900)]
    early, late = sizes[:300], sizes[600:]
    assert changes([(num, 0) for num in late]) <= changes([(num, 0) for num in early])
    assert changes([(num, 0) for num in late]) <= 4


def test_between_need_and_comfort_nothing_changes() -> None:
    holding = Holding(30.0)
    sizes = [holding.decide(ReplicaNeed(10.0 * number, 3, 5), 4, 0.0) for number in range(10)]
    assert sizes == [4] * 10
    assert holding.decide(ReplicaNeed(100.0, 5, 6), 4, 0.0) == 5
    assert [holding.decide(ReplicaNeed(110.0 + 10 * number, 2, 3), 5, 0.0) for number in range(4)] == [5, 5, 5, 3]


def test_no_traffic_keeps_the_minimum() -> None:
    least = replace(SETTINGS, min_prefill=2, min_decode=3)
    assert Loop(SloPlanner(least), lambda now_s: 0.0, 60.0, (5, 5)).run(100)[-1] == (2, 3)
    assert Loop(SloPlanner(SETTINGS), lambda now_s: 0.0, 60.0, (5, 5)).run(100)[-1] == (1, 1)


def test_the_maximum_holds_and_is_named() -> None:
    loop = Loop(SloPlanner(replace(SETTINGS, max_prefill=3)), lambda now_s: 100.0, 60.0)
    assert max(num for num, _ in loop.run(30)) == 3
    assert "TTFT without end" in loop.plans[-1].warnings[-1]


def test_a_budget_is_kept_and_its_ratio_follows_demand() -> None:
    """The same budget: where prompts are what presses, prefill gets the replicas, and decode where answers are."""
    tight = replace(SETTINGS, max_accelerators=8)
    long_prompts = Loop(SloPlanner(tight), lambda now_s: 60.0, 60.0)
    sizes = long_prompts.run(40)
    assert all(sum(size) <= 8 for size in sizes)
    assert sizes[-1][0] > sizes[-1][1]
    warning = long_prompts.plans[-1].warnings[0]
    assert "8 are allowed" in warning
    assert "prefill" in warning
    assert "not met" in long_prompts.plans[-1].warnings[-1]
    long_answers = replace(
        traffic(20.0), num_prompt_tokens=200 * 400, num_cached_tokens=0, num_output_tokens=200 * 2000
    )
    seen = replace(observation(10.0, 20.0, pool(4), pool(4)), traffic=long_answers)
    plan = SloPlanner(tight).plan(seen)
    assert (plan.num_prefill, plan.num_decode) == (1, 7)
    assert "8 are allowed" in plan.warnings[0]


@pytest.mark.parametrize(("budget", "rate", "seed"), [(8, 38.0, 1), (8, 41.0, 2), (16, 80.0, 1)])
def test_noise_moves_little_within_a_budget(budget: int, rate: float, seed: int) -> None:
    """It chose the division of least strain anew in each window, which noise decided: a move in each second minute."""
    tight = replace(SETTINGS, max_accelerators=budget)
    loop = Loop(SloPlanner(tight), noisy(rate, seed), 60.0, (4, 4))
    sizes = loop.run(720)[90:]
    assert any("are allowed" in warning for plan in loop.plans[90:] for warning in plan.warnings)
    assert changes(sizes) <= 8
    assert all(sum(size) <= budget for size in sizes)


def test_a_budget_is_divided_anew_at_once_where_that_helps_much() -> None:
    """Answers ten times as long: decode gets its replicas in the next windows, without the hold of a shrinking pool.

    A window takes two replicas away at most, as the actuator does, and a replica takes a minute to start.
    """
    planner = SloPlanner(replace(SETTINGS, max_accelerators=12))
    sizes, decodes = (8, 4), []
    for number in range(1, 8):
        seen = observation(10.0 * number, 60.0, pool(sizes[0]), pool(sizes[1]))
        if number > 3:
            seen = replace(seen, traffic=replace(seen.traffic, num_output_tokens=10 * seen.traffic.num_output_tokens))
        num_prefill = max(planner.plan(seen).num_prefill, sizes[0] - 2)
        sizes = num_prefill, 12 - num_prefill
        decodes.append(sizes[1])
    assert decodes[2] < 6 < decodes[3]


def test_a_smaller_budget_is_kept_at_once() -> None:
    plan = SloPlanner(replace(SETTINGS, max_accelerators=8)).plan(observation(10.0, 60.0, pool(9), pool(9)))
    assert plan.num_prefill + plan.num_decode == 8


def test_a_budget_counts_accelerators_not_replicas() -> None:
    tight = replace(SETTINGS, max_accelerators=16, prefill_accelerators=4, decode_accelerators=2)
    sizes = Loop(SloPlanner(tight), lambda now_s: 60.0, 60.0).run(40)
    assert all(4 * num_prefill + 2 * num_decode <= 16 for num_prefill, num_decode in sizes)


def test_a_budget_that_suffices_changes_nothing() -> None:
    free = Loop(SloPlanner(SETTINGS), lambda now_s: 20.0, 60.0)
    bound = Loop(SloPlanner(replace(SETTINGS, max_accelerators=64)), lambda now_s: 20.0, 60.0)
    assert free.run(60) == bound.run(60)
    assert not bound.plans[-1].warnings


def test_a_backlog_asks_for_more() -> None:
    calm, late = SloPlanner(SETTINGS), SloPlanner(SETTINGS)
    without = calm.plan(observation(10.0, 10.0, pool(2, 0.0), pool(2, 0.0)))
    behind = late.plan(observation(10.0, 10.0, pool(2, 0.0, queued_ms=120_000.0), pool(2, 0.0)))
    assert behind.num_prefill > without.num_prefill
    assert "backlog" in behind.reason


def test_replicas_that_start_are_not_asked_for_again() -> None:
    """Four that are ready in ten seconds work most of the backlog off before a new one could help."""
    coming = pool(6, 60.0, num_ready=2, starting_s=[50.0] * 4, queued_ms=180_000.0)
    assert SloPlanner(SETTINGS).plan(observation(10.0, 38.0, coming, pool(3))).num_prefill == 6
    alone = pool(6, 60.0, num_ready=2, queued_ms=180_000.0)
    assert SloPlanner(SETTINGS).plan(observation(10.0, 38.0, alone, pool(3))).num_prefill > 8


def test_a_speed_that_nobody_knows_changes_nothing() -> None:
    blind = SloPlanner(SETTINGS).plan(observation(10.0, 50.0, pool(2, speed=None), pool(3)))
    assert (blind.num_prefill, blind.num_decode) == (2, 3)
    assert blind.then is None
    assert "speed" in blind.warnings[0]
    told = SloPlanner(SETTINGS, prior_prefill=SPEED).plan(observation(10.0, 50.0, pool(2, speed=None), pool(3)))
    assert told.num_prefill > 2


def _with_tpot(planner: SloPlanner, num_ready_at: dict[int, int], tpot_ms: float, num_windows: int) -> int:
    """Decode replicas wanted when every window measures the same step time."""
    num_ready, wanted = 0, 0
    for number in range(1, num_windows + 1):
        num_ready = num_ready_at.get(number, num_ready)
        decode = pool(num_ready, num_running=20 * num_ready, num_context_tokens=82_000 * num_ready)
        seen = replace(observation(10.0 * number, 20.0, pool(6), decode), tpot_ms=tpot_ms)
        wanted = planner.plan(seen).num_decode
    return wanted


def test_steps_that_prove_slow_are_learned_but_not_from_new_replicas() -> None:
    """A cold replica's first seconds say nothing (dynamo#12430)."""
    true_ms = SPEED.decode.step_ms(20, 82_000)
    usual = _with_tpot(SloPlanner(SETTINGS), {1: 4}, true_ms, 40)
    slow = _with_tpot(SloPlanner(SETTINGS), {1: 4}, 2 * true_ms, 40)
    assert slow > usual
    always_new = {number: 4 + number // 3 for number in range(1, 40)}
    cold, warm = (SloPlanner(replace(SETTINGS, warmup_s=warmup_s)) for warmup_s in (60.0, 0.0))
    unbiased = _with_tpot(SloPlanner(SETTINGS), always_new, true_ms, 39)
    assert _with_tpot(cold, always_new, 2 * true_ms, 39) == unbiased
    assert _with_tpot(warm, always_new, 2 * true_ms, 39) > unbiased


def test_slow_prefill_is_learned_from_a_busy_pool() -> None:
    """The queue grows although the speed says it must not: the workers do half of what they should."""
    planner, queued_ms = SloPlanner(SETTINGS), 100_000.0
    plans = []
    for number in range(1, 30):
        arrived_ms = 20.0 * 10 * SERVICE_S * 1000
        queued_ms += arrived_ms - 0.5 * 3 * 10_000
        plans.append(planner.plan(observation(10.0 * number, 20.0, pool(3, 0.0, queued_ms=queued_ms), pool(4, 0.0))))
    honest = SloPlanner(SETTINGS).plan(observation(10.0, 20.0, pool(3, 0.0), pool(4, 0.0)))
    assert plans[-1].then is not None
    assert honest.then is not None
    assert plans[-1].then.prefill_use * plans[-1].num_prefill > 1.7 * honest.then.prefill_use * honest.num_prefill


def test_prompts_that_vary_more_need_more_room() -> None:
    """The same tokens in prompts of very different lengths: long ones hold up the queue and take long themselves."""
    plans = []
    for variation in (0.1, 2.5):
        seen = observation(10.0, 20.0, pool(3), pool(3))
        plans.append(SloPlanner(SETTINGS).plan(replace(seen, traffic=replace(seen.traffic, variation=variation))))
    assert plans[1].num_prefill > plans[0].num_prefill
    assert plans[1].num_decode >= plans[0].num_decode


def test_a_prompt_too_long_for_its_objective_is_said_to_be() -> None:
    hasty = SloPlanner(replace(SETTINGS, ttft_ms=100.0))
    plan = hasty.plan(observation(10.0, 10.0, pool(2), pool(2)))
    assert "by itself" in plan.warnings[0]
    assert "no number" in plan.warnings[0]
    assert plan.num_prefill < 10, "replicas that do not help are not asked for"


@pytest.mark.parametrize("tpot_ms", [7.0, 8.1])
def test_a_step_too_long_for_its_objective_is_said_to_be_and_costs_nothing(tpot_ms: float) -> None:
    """A decode step of SPEED takes over 8 ms: without traffic the pool shrinks to its minimum all the same."""
    hasty = replace(SETTINGS, tpot_ms=tpot_ms)
    assert Loop(SloPlanner(hasty), lambda now_s: 0.0, 60.0).run(100)[-1] == (1, 1)
    busy = Loop(SloPlanner(hasty), lambda now_s: 5.0, 60.0)
    assert max(num_decode for _, num_decode in busy.run(100)) <= 2
    assert "step of one request alone" in busy.plans[-1].warnings[0]


def test_the_reason_has_the_numbers() -> None:
    plan = SloPlanner(SETTINGS).plan(observation(10.0, 40.0, pool(2), pool(2)))
    assert "40.0 requests/s now" in plan.reason
    assert f"prefill 2 to {plan.num_prefill}" in plan.reason
    assert "of 2000 ms" in plan.reason
    assert "of 50 ms" in plan.reason
    assert plan.now is not None
    assert not plan.now.meets_slo
    assert _after(plan) <= 2000.0


def test_the_same_past_gives_the_same_plans() -> None:
    first, second = (Loop(SloPlanner(SETTINGS), noisy(20.0, 5), 60.0) for _ in range(2))
    assert first.run(100) == second.run(100)
    assert [plan.reason for plan in first.plans] == [plan.reason for plan in second.plans]


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"ttft_ms": 0.0}, "objectives"),
        ({"min_prefill": 0}, "min_prefill"),
        ({"min_decode": 9, "max_decode": 3}, "min_decode"),
        ({"max_accelerators": 1}, "at least 2"),
        ({"share": 1.0}, "share"),
        ({"interval_s": 0.0}, "interval_s"),
    ],
)
def test_settings_that_cannot_be_planned_with_are_refused(changed: dict[str, float], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        PlannerConfig(**{"ttft_ms": 1000.0, "tpot_ms": 50.0, **changed})  # type: ignore[arg-type]
