import pytest

from tandem.architecture.catalogue import find_cost
from tandem.planning.aggregated import AggregatedSizing, size_aggregated
from tandem.planning.hardware import find_accelerator
from tandem.planning.profile import Profile, draw_profile
from tandem.planning.roofline import Roofline
from tandem.planning.sizing import Goals
from tandem.workload.lengths import Fixed, LogNormal

H100 = Roofline(find_cost("qwen3-8b"), find_accelerator("h100"))
VARIED = draw_profile(LogNormal(2000, 8000, 32_000), LogNormal(200, 600, 4000))
GOALS = Goals(ttft_ms=1000, tpot_ms=40)


@pytest.mark.parametrize("rate_per_s", [1.0, 10.0, 100.0])
def test_one_pool_meets_what_is_asked_and_one_worker_less_would_not(rate_per_s: float) -> None:
    sizing = size_aggregated(H100, VARIED, GOALS, rate_per_s)
    assert not sizing.problems
    assert sizing.decode is None
    assert sizing.ttft.high_ms <= GOALS.ttft_ms
    assert sizing.tpot.high_ms <= GOALS.tpot_ms
    fewer = sizing.prefill.num_workers - 1
    if fewer:
        needs = AggregatedSizing(H100, VARIED, GOALS, rate_per_s)._needs()
        assert not all(need(fewer) for need in needs.values())


def test_a_token_waits_for_the_chunk_that_its_step_carries() -> None:
    profile = draw_profile(Fixed(16_000), Fixed(200))
    sizing = size_aggregated(H100, profile, GOALS, 2.0)
    last_chunk_ms = H100.prefill_ms(16_000, 16_000 - GOALS.chunk_tokens)
    assert sizing.longest_gap_ms > last_chunk_ms > 2 * sizing.tpot.mean_ms
    short = size_aggregated(H100, profile, Goals(ttft_ms=1000, tpot_ms=40, chunk_tokens=256), 2.0)
    assert short.longest_gap_ms < sizing.longest_gap_ms / 3
    cached = size_aggregated(H100, Profile([(16_000, 200)], prefix_hit=0.99), GOALS, 2.0)
    assert cached.longest_gap_ms < sizing.longest_gap_ms / 3


def test_decode_steps_delay_first_tokens() -> None:
    """Each of four chunks of a prompt carries a step, whose KV is read besides."""
    profile = draw_profile(Fixed(8000), Fixed(500))
    whole = AggregatedSizing(H100, profile, GOALS, 1.0)
    queue, batch = whole._queue(2), whole._batch(2)
    along_ms = batch.along_ms(batch.running())
    assert along_ms > 1
    assert queue.service_ms == pytest.approx(H100.prefill_ms(8000) + 4 * along_ms)
    assert size_aggregated(H100, profile, GOALS, 1.0).ttft.mean_ms >= queue.service_ms


def test_prompts_alone_are_the_queue_and_answers_alone_the_batch() -> None:
    """A worker of both phases behaves like one of a single phase if there is nothing to disturb."""
    prompts = size_aggregated(H100, Profile([(4000, 1)]), GOALS, 2.0)
    service_ms = H100.prefill_ms(4000)
    use = 2.0 * service_ms / 1000
    wait_ms = use * service_ms / (2 * (1 - use))  # Pollaczek-Khinchine, of a constant service time
    assert wait_ms > 0.1 * service_ms
    assert prompts.ttft.mean_ms == pytest.approx(service_ms + wait_ms, rel=0.001)
    answers = size_aggregated(H100, Profile([(1, 1000)]), GOALS, 0.1)
    assert answers.tpot.mean_ms == pytest.approx(H100.step_ms(1, 500), rel=0.02)


def test_what_cannot_be_met_is_said() -> None:
    (slow,) = size_aggregated(H100, draw_profile(Fixed(40_000), Fixed(10)), GOALS, 1.0).problems
    assert "TTFT 1000 ms cannot be met by any number of workers" in slow
    (step,) = size_aggregated(H100, VARIED, Goals(ttft_ms=1000, tpot_ms=3), 1.0).problems
    assert "TPOT 3 ms cannot be met by any number of workers" in step
    large = Roofline(find_cost("llama-3-70b"), find_accelerator("h100"))
    (memory,) = size_aggregated(large, VARIED, GOALS, 1.0).problems
    assert "a worker cannot hold llama-3-70b" in memory
