import heapq
import math
import random

import pytest

from tandem.architecture.catalogue import find_cost
from tandem.planning.hardware import find_accelerator
from tandem.planning.prefill_queue import PrefillQueue, prompt_queue
from tandem.planning.profile import Profile, draw_profile
from tandem.planning.roofline import Roofline
from tandem.workload.lengths import Fixed, LogNormal

ROOFLINE = Roofline(find_cost("qwen3-8b"), find_accelerator("h100"))
VARIED = draw_profile(LogNormal(2000, 8000, 32_000), Fixed(100))


def queue(rate_per_s: float, profile: Profile = VARIED) -> PrefillQueue:
    return prompt_queue(ROOFLINE, profile, rate_per_s, chunk_tokens=2048)


def simulate(prompts: PrefillQueue, num_workers: int, num_requests: int) -> list[float]:
    """Times to the first token of Poisson arrivals at workers that take the first of one queue."""
    source = random.Random(3)
    free_ms = [0.0] * num_workers
    now_ms, ttfts = 0.0, []
    for _ in range(num_requests):
        now_ms += source.expovariate(prompts.rate_per_s) * 1000
        begin_ms = max(now_ms, heapq.heappop(free_ms))
        end_ms = begin_ms + source.choice(prompts.services_ms)
        heapq.heappush(free_ms, end_ms)
        ttfts.append(end_ms - now_ms)
    return sorted(ttfts)


@pytest.mark.parametrize(("num_workers", "use"), [(1, 0.3), (1, 0.7), (4, 0.8), (16, 0.85)])
def test_the_prediction_is_what_a_simulation_gives(num_workers: int, use: float) -> None:
    """Means within a tenth; the 95th percentile within a sixth, where waits are taken as exponential."""
    prompts = queue(1.0)
    prompts = queue(use * num_workers / prompts.offered)
    ttfts = simulate(prompts, num_workers, 60_000)
    mean = math.fsum(ttfts) / len(ttfts)
    assert prompts.mean_ttft_ms(num_workers) == pytest.approx(mean, rel=0.1)
    assert prompts.ttft_at(num_workers, 0.95) == pytest.approx(ttfts[int(0.95 * len(ttfts))], rel=0.17)


def test_without_waiting_it_is_the_prompt_s_own_time() -> None:
    fixed = queue(0.001, draw_profile(Fixed(5000), Fixed(1)))
    own_ms = ROOFLINE.prefill_ms(5000)
    assert fixed.ttft_at(8, 0.99) == pytest.approx(own_ms, rel=0.001)
    assert fixed.mean_ttft_ms(8) == pytest.approx(own_ms)
    assert fixed.attainment(8, own_ms + 0.01) == pytest.approx(1.0)
    assert fixed.attainment(8, own_ms - 0.01) == 0.0


def test_more_work_than_workers_is_never_done() -> None:
    crowded = queue(100.0)
    too_few = int(crowded.offered)
    assert crowded.attainment(too_few, 1e9) == 0.0
    assert math.isinf(crowded.ttft_at(too_few, 0.95))
    assert math.isinf(crowded.mean_ttft_ms(too_few))
    assert math.isfinite(crowded.ttft_at(too_few + 1, 0.95))


def test_more_workers_attain_more_and_the_percentile_is_the_inverse() -> None:
    prompts = queue(20.0)
    shares = [prompts.attainment(num, 800.0) for num in range(5, 30)]
    assert shares == sorted(shares)
    ttft_ms = prompts.ttft_at(6, 0.9)
    assert prompts.attainment(6, ttft_ms) == pytest.approx(0.9, abs=0.002)


def test_cached_prompts_and_chunks_change_the_service() -> None:
    cached = Profile([(8000, 1)], prefix_hit=0.5)
    half = prompt_queue(ROOFLINE, cached, 1.0, chunk_tokens=1000)
    assert half.service_ms == pytest.approx(ROOFLINE.prefill_ms(8000, 4000))
    assert half.mean_chunks == 4
    assert half.slowed(10).service_ms == pytest.approx(half.service_ms + 40)
