from dataclasses import replace
from itertools import pairwise

import pytest

from tandem.architecture.catalogue import find_cost
from tandem.architecture.draft_cost import DrafterCost
from tandem.planning.feasibility import misfits
from tandem.planning.hardware import find_accelerator, find_link
from tandem.planning.planned_drafts import PlannedDrafts
from tandem.planning.pool_sizing import PoolSizing, size_pools
from tandem.planning.prefill_queue import prompt_queue
from tandem.planning.profile import Profile, draw_profile
from tandem.planning.roofline import TYPICAL, Roofline
from tandem.planning.sizing import DeploymentSite, Goals, Sizing
from tandem.workload.lengths import Fixed, LogNormal

VARIED = draw_profile(LogNormal(2000, 8000, 32_000), LogNormal(200, 600, 4000), 0.3)


def site(
    shape: str = "qwen3-8b",
    *,
    profile: Profile = VARIED,
    link: str = "rdma-400g",
    num: int = 1,
    decode: str = "h100",
    ttft_ms: float = 1000.0,
    tpot_ms: float = 50.0,
    max_running: int = 256,
) -> DeploymentSite:
    model = find_cost(shape)
    return DeploymentSite(
        prefill=Roofline(model, find_accelerator("h100"), num),
        decode=Roofline(model, find_accelerator(decode), num),
        link=find_link(link),
        profile=profile,
        goals=Goals(ttft_ms=ttft_ms, tpot_ms=tpot_ms, max_running=max_running),
    )


def num_decode(sizing: Sizing) -> int:
    assert sizing.decode is not None
    return sizing.decode.num_workers


def limit_of_decode(sizing: Sizing) -> str:
    assert sizing.decode is not None
    return sizing.decode.limit


@pytest.mark.parametrize("rate_per_s", [0.5, 5.0, 40.0, 300.0])
def test_pools_meet_what_is_asked_and_one_worker_less_would_not(rate_per_s: float) -> None:
    asked = site()
    sizing = size_pools(asked, rate_per_s)
    assert not sizing.problems
    assert sizing.ttft.high_ms <= asked.goals.ttft_ms
    assert sizing.tpot.high_ms <= asked.goals.tpot_ms
    queue = prompt_queue(asked.prefill, asked.profile, rate_per_s, asked.goals.chunk_tokens)
    fewer = sizing.prefill.num_workers - 1
    if fewer:
        assert queue.offered > 0.85 * fewer or queue.ttft_at(fewer, 0.95) > asked.goals.ttft_ms
    assert sizing.prefill.time_use == pytest.approx(queue.offered / sizing.prefill.num_workers)
    assert sizing.decode is not None
    assert sizing.decode.kv_use is not None
    assert sizing.decode.kv_use <= asked.goals.max_use


def test_decode_pools_are_as_small_as_their_limits_allow() -> None:
    asked, rate_per_s = site(), 100.0
    whole = PoolSizing(asked, rate_per_s)
    sizing = whole.sizing()
    assert limit_of_decode(sizing) == "KV memory"
    assert whole._kv_use(num_decode(sizing)) <= asked.goals.max_use < whole._kv_use(num_decode(sizing) - 1)


def test_more_load_never_needs_fewer_workers() -> None:
    sizings = [size_pools(site(), rate) for rate in (1.0, 3.0, 10.0, 30.0, 100.0)]
    for one, more in pairwise(sizings):
        assert one.prefill.num_workers <= more.prefill.num_workers
        assert num_decode(one) <= num_decode(more)


def test_what_asks_for_the_size_is_named() -> None:
    answers = draw_profile(Fixed(200), Fixed(1000))
    assert limit_of_decode(size_pools(site(profile=answers, max_running=20), 20.0)) == "requests at once"
    assert limit_of_decode(size_pools(site(profile=answers, tpot_ms=8.5), 20.0)) == "TPOT"
    assert size_pools(site(profile=draw_profile(Fixed(9000), Fixed(50)), ttft_ms=320), 10.0).prefill.limit == "TTFT"
    slow = size_pools(site(link="tcp-10g", tpot_ms=200), 20.0)
    assert slow.prefill.limit == limit_of_decode(slow) == "link"
    assert slow.prefill.link_use <= 0.7


def test_prefix_hits_and_faster_memory_save_workers() -> None:
    without = site(profile=replace(VARIED, prefix_hit=0.0))
    assert size_pools(site(), 100.0).prefill.num_workers < size_pools(without, 100.0).prefill.num_workers
    assert num_decode(size_pools(site(decode="h200"), 100.0)) < num_decode(size_pools(site(), 100.0))


def test_a_prompt_that_alone_takes_too_long_is_said_and_the_pool_keeps_up() -> None:
    sizing = size_pools(site(profile=draw_profile(Fixed(40_000), Fixed(500))), 2.0)
    assert len(sizing.problems) == 1
    assert "TTFT 1000 ms cannot be met by any number of prefill workers" in sizing.problems[0]
    assert "a prompt of 40,000 tokens (p95) alone takes 1,893 ms" in sizing.problems[0]
    assert sizing.prefill.time_use is not None
    assert 0.5 < sizing.prefill.time_use <= 0.85


def test_a_step_that_alone_takes_too_long_is_said() -> None:
    (problem,) = size_pools(site(tpot_ms=5), 2.0).problems
    assert "TPOT 5 ms cannot be met by any number of decode workers: a step of a single request takes 7." in problem


def test_a_hand_off_that_alone_takes_too_long_is_said() -> None:
    """Short answers of long prompts over a slow link: the second token waits, whatever the number of workers."""
    few_tokens = draw_profile(Fixed(30_000), Fixed(5))
    (problem,) = size_pools(site(profile=few_tokens, link="tcp-10g", ttft_ms=5000), 1.0).problems
    assert "the hand-off adds" in problem
    assert "or a faster link" in problem


def test_a_model_that_does_not_fit_is_said_with_how_many_accelerators_hold_it() -> None:
    problems = size_pools(site("llama-3-70b"), 1.0).problems
    assert len(problems) == 2
    assert "a prefill worker cannot hold llama-3-70b: the weights take 141.1 GB, and h100 has 72.0 GB" in problems[0]
    assert "use 2 accelerators a worker or more" in problems[0]
    assert not size_pools(site("llama-3-70b", num=4, ttft_ms=3000), 1.0).problems
    two = Roofline(find_cost("llama-3-70b"), find_accelerator("h100"), 2, TYPICAL)
    assert two.kv_memory_bytes > 0


def test_a_request_that_does_not_fit_is_said() -> None:
    problems = size_pools(site(profile=Profile([(500_000, 10)]), ttft_ms=1e6), 0.01).problems
    assert "cannot hold the longest request: 500,010 tokens need 73.7 GB of KV, and h100 has 55.6 GB" in problems[0]


def drafting(drafter: str, num: int = 1) -> Roofline:
    drafts = PlannedDrafts(drafter=DrafterCost(find_cost(drafter)), acceptance=0.6, most=3)
    return Roofline(find_cost("qwen3-8b"), find_accelerator("h100"), num, drafts=drafts)


def test_a_drafter_that_no_accelerator_holds_is_said() -> None:
    """Each accelerator has room for the whole drafter, so more of them do not help; it said "use 0 accelerators"."""
    (problem,) = misfits(drafting("llama-3-70b", 2), VARIED, "a decode worker")
    assert problem == (
        "a decode worker cannot hold the drafter: each accelerator has room for its 141.1 GB, and h100 has 72.0 GB for "
        "weights and KV; use accelerators with more memory, or a smaller drafter"
    )


def test_a_request_that_does_not_fit_with_its_drafters_kv_is_said() -> None:
    """The report had no pools then, as for a model that does not fit, and recommended some."""
    decode, long = drafting("llama-3-8b"), Profile([(200_000, 10)])
    assert decode.model.kv_bytes(long.longest) < decode.kv_memory_bytes < decode.held_bytes(long.longest)
    (problem,) = misfits(decode, long, "a decode worker")
    assert "a decode worker cannot hold the longest request: 200,010 tokens need 55.7 GB of KV" in problem


def test_more_than_every_count_is_said() -> None:
    assert any("workers do not suffice" in problem for problem in size_pools(site(), 5e5).problems)


def test_cost_is_of_all_accelerators_and_their_tokens() -> None:
    sizing = size_pools(site("llama-3-70b", num=4, decode="h200", ttft_ms=3000), 5.0)
    assert sizing.num_accelerators == 4 * (sizing.prefill.num_workers + num_decode(sizing))
    assert sizing.usd_per_hour == pytest.approx(4 * (2.5 * sizing.prefill.num_workers + 3.5 * num_decode(sizing)))
    assert sizing.usd_per_million(300) == pytest.approx(sizing.usd_per_hour / (5 * 3600 * 300) * 1e6)
