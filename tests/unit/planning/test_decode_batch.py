import math
import random

import pytest

from tandem.architecture.catalogue import find_cost
from tandem.planning.decode_batch import DecodeBatch
from tandem.planning.hardware import find_accelerator
from tandem.planning.profile import draw_profile
from tandem.planning.roofline import Roofline
from tandem.workload.lengths import Fixed

ROOFLINE = Roofline(find_cost("qwen3-8b"), find_accelerator("h100"))
PROFILE = draw_profile(Fixed(2000), Fixed(200))


def batch(rate_per_s: float, num_workers: int = 1, busy: float = 0.0, chunk_ms: float = math.inf) -> DecodeBatch:
    return DecodeBatch(ROOFLINE, PROFILE, rate_per_s, num_workers, 0.95, busy, chunk_ms)


def simulate(rate_per_s: float, num_requests: int) -> tuple[float, float]:
    """Of one worker with random arrivals, step by step: the mean batch in time, and the mean time of a token."""
    source = random.Random(5)
    now_ms = end_ms = 0.0
    running: list[int] = []
    busy_tokens, tpots, arrived, begun = 0.0, [], 0, list[float]()
    next_ms = source.expovariate(rate_per_s) * 1000
    while arrived < num_requests:
        while next_ms <= now_ms:
            running.append(200)
            begun.append(now_ms)
            arrived += 1
            next_ms += source.expovariate(rate_per_s) * 1000
        if not running:
            now_ms = next_ms
            continue
        step_ms = ROOFLINE.step_ms(len(running), PROFILE.mean_context)
        now_ms += step_ms
        busy_tokens += step_ms * len(running)
        running = [left - 1 for left in running]
        tpots += [(now_ms - start) / 200 for left, start in zip(running, begun, strict=True) if left == 0]
        begun = [start for left, start in zip(running, begun, strict=True) if left]
        running = [left for left in running if left]
        end_ms = now_ms
    return busy_tokens / end_ms, math.fsum(tpots) / len(tpots)


@pytest.mark.parametrize("rate_per_s", [3.0, 12.0])
def test_the_steady_state_is_what_a_simulation_gives(rate_per_s: float) -> None:
    """Within a twelfth."""
    predicted = batch(rate_per_s)
    running, tpot_ms = simulate(rate_per_s, 1500)
    assert predicted.running() == pytest.approx(running, rel=0.08)
    assert predicted.step_ms(predicted.running()) == pytest.approx(tpot_ms, rel=0.08)


def test_little_s_law_holds() -> None:
    found = batch(30.0, 3)
    running = found.running()
    assert running == pytest.approx(30 / 3 * 200 * found.step_ms(running) / 1000, rel=1e-4)


def test_more_tokens_than_a_worker_can_give_have_no_steady_state() -> None:
    assert math.isinf(batch(60.0).running())
    assert math.isinf(batch(60.0).step_ms(math.inf))
    assert math.isfinite(batch(60.0, 10).running())


def test_the_crowd_is_relatively_smaller_in_large_pools() -> None:
    one, ten = batch(10.0, 1), batch(100.0, 10)
    assert one.running() == pytest.approx(ten.running(), rel=1e-4)
    assert one.crowd(25.0) == pytest.approx(25 + 1.645 * 5, rel=0.001)
    assert ten.crowd(10.0) == pytest.approx(10 + 1.645, rel=0.001)
    assert one.crowd(one.running()) > ten.crowd(ten.running()) > ten.running()


def test_kv_counts_requests_and_those_that_have_it_promised() -> None:
    found = batch(10.0)
    each = PROFILE.mean_context * 147_456 / ROOFLINE.kv_memory_bytes
    assert found.kv_use(10, 0) == pytest.approx(10 * each)
    assert found.kv_use(10, 5) == pytest.approx(15 * each)
    too_big = Roofline(find_cost("llama-3-70b"), find_accelerator("h100"))
    assert math.isinf(DecodeBatch(too_big, PROFILE, 1.0, 1, 0.95).kv_use(1, 0))


def test_chunks_of_prompts_slow_steps_down_and_carry_some() -> None:
    """A worker half busy with chunks gives fewer steps than an idle one, but more than half as many."""
    alone, shared = batch(5.0).step_ms(10), batch(5.0, busy=0.5, chunk_ms=70.0).step_ms(10)
    assert alone < shared < 2 * alone
    steps_per_ms = 0.5 / alone + 0.5 / 70 * (1 - batch(5.0).along_ms(10) / alone)
    assert shared == pytest.approx(1 / steps_per_ms)
    assert math.isinf(batch(5.0, busy=1.0, chunk_ms=70.0).step_ms(10))
    assert batch(5.0).along_ms(10) == pytest.approx(1000 * 10 * 2100 * 147_456 / (3.35e12 * 0.75))
