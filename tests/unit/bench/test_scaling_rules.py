"""The rules we compare with do what their sources say, and nothing kinder or worse."""

from dataclasses import replace

from bench.scaling_rules import FixedPools, QueueRule, UtilisationRule
from bench.two_loop_rule import TwoLoopRule
from tandem.planning.observation import Observation
from tests.unit.planning.loop import SETTINGS, SPEED, Loop, observation, pool

SERVICE_MS = SPEED.prefill.prompt_ms(4000, 1000)
IDLE = pool(2)


def _busy(now_s: float, num: int, use: float) -> Observation:
    """`num` prefill workers, each busy for `use` of the window."""
    return observation(now_s, use * num * 1000 / SERVICE_MS, pool(num), IDLE)


def test_fixed_pools_stay() -> None:
    plan = FixedPools(3, 4).plan(_busy(10.0, 1, 1.0))
    assert (plan.num_prefill, plan.num_decode) == (3, 4)


def test_the_hpa_scales_by_use_over_target_outside_its_tolerance() -> None:
    assert UtilisationRule(SETTINGS).plan(_busy(15.0, 4, 1.0)).num_prefill == 6
    assert UtilisationRule(SETTINGS).plan(_busy(15.0, 4, 0.74)).num_prefill == 4


def test_the_hpa_shrinks_to_the_highest_of_five_minutes() -> None:
    rule = UtilisationRule(SETTINGS)
    sizes = [rule.plan(_busy(15.0 * number, 6, 0.9 if number == 1 else 0.2)).num_prefill for number in range(1, 30)]
    assert sizes[0] == 8
    assert sizes[20] == 8
    assert sizes[21:] == [2] * 8


def test_the_hpa_sees_decode_by_its_kv() -> None:
    full = pool(2, num_context_tokens=700_000)
    assert UtilisationRule(SETTINGS).plan(observation(15.0, 1.0, IDLE, full)).num_decode == 3


def test_keda_counts_those_that_wait() -> None:
    waiting = pool(2, num_waiting=23)
    assert QueueRule(SETTINGS).plan(observation(15.0, 1.0, waiting, IDLE)).num_prefill == 5
    rule = QueueRule(SETTINGS)
    assert rule.plan(observation(15.0, 1.0, IDLE, IDLE)).num_prefill == 2, "it begins with what it found"
    assert rule.plan(observation(316.0, 1.0, IDLE, IDLE)).num_prefill == 1


def test_the_quick_loop_moves_by_one_and_watches_while_replicas_start() -> None:
    late = pool(3, queued_ms=30_000.0)
    assert TwoLoopRule(SETTINGS).plan(observation(5.0, 5.0, late, IDLE)).num_prefill == 4
    starting = replace(late, num_wanted=4, starting_s=[5.0])
    assert TwoLoopRule(SETTINGS).plan(observation(5.0, 5.0, starting, IDLE)).num_prefill == 4
    assert TwoLoopRule(SETTINGS).plan(observation(5.0, 5.0, pool(3), IDLE)).num_prefill == 2


def test_the_quick_loop_keeps_what_the_rest_could_not_bear() -> None:
    """Two workers would each have 0.9 of the objective before them."""
    near = pool(3, queued_ms=2 * (1800.0 - SERVICE_MS))
    assert TwoLoopRule(SETTINGS).plan(observation(5.0, 5.0, near, IDLE)).num_prefill == 3


def test_the_slow_loop_sets_the_least() -> None:
    """Demand over capacity, without any room: three and a half workers' work takes four."""
    rate = 3.5 * 1000 / SERVICE_MS
    sizes = Loop(TwoLoopRule(SETTINGS), lambda now_s: rate, 0.0, (6, 2)).run(80, interval_s=5.0)
    assert sizes[10][0] < 4, "the quick loop alone knows queues only"
    assert min(num for num, _ in sizes[36:]) == 4


def test_rules_keep_the_bounds() -> None:
    bounded = replace(SETTINGS, min_prefill=2, max_prefill=3)
    for rule in (UtilisationRule(bounded), QueueRule(bounded), TwoLoopRule(bounded)):
        assert rule.plan(_busy(15.0, 3, 1.0)).num_prefill <= 3
    crowded = pool(3, num_waiting=100, queued_ms=1e6)
    for rule in (UtilisationRule(bounded), QueueRule(bounded), TwoLoopRule(bounded)):
        assert rule.plan(observation(15.0, 50.0, crowded, IDLE)).num_prefill == 3
