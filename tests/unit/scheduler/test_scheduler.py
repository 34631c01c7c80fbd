"""The scheduler's promises one by one; random traffic is in `test_scheduler_stateful`."""

import pytest

from tandem.core.draft_counts import DraftCounts
from tandem.core.errors import CapacityError, InvalidRequestError
from tandem.core.sampling_params import SamplingParams
from tandem.core.types import FinishReason
from tandem.kvcache.manager import KVCacheManager
from tandem.scheduler.output import DraftTimes, ExecutorOutput, SampledToken
from tandem.scheduler.request import Request, RequestState
from tandem.scheduler.scheduler import Scheduler
from tests.helpers.fake_executor import fake_answer
from tests.helpers.layouts import BLOCK_SIZE, layout_of
from tests.helpers.requests import Bench, bench_of, request_of


def test_a_long_prompt_is_computed_in_slices_of_the_budget() -> None:
    bench = bench_of(budget=8)
    bench.scheduler.add(request_of("a", list(range(19)), max_tokens=1))
    bench.run()
    assert [step.num_tokens for step in bench.steps] == [8, 8, 3]
    assert [step.scheduled[0].samples for step in bench.steps] == [False, False, True]


def test_decodes_go_on_while_a_long_prompt_is_computed() -> None:
    bench = bench_of(budget=8, num_running=4)
    for name in "ab":
        bench.scheduler.add(request_of(name, [1 if name == "a" else 2], max_tokens=9))
    bench.step()
    bench.scheduler.add(request_of("long", list(range(40)), max_tokens=1))
    bench.step()
    assert [(item.request_id, item.num_tokens) for item in bench.steps[-1].scheduled] == [
        ("a", 1),
        ("b", 1),
        ("long", 6),
    ]


def test_requests_with_the_same_prefix_compute_it_once() -> None:
    bench = bench_of(num_blocks=200, budget=16, num_running=8)
    prefix = list(range(80))
    requests = [request_of(f"r{i}", [*prefix, 90 + i], max_tokens=2, seed=i) for i in range(8)]
    for request in requests:
        bench.scheduler.add(request)
    ended = bench.run()
    assert bench.executor.num_computed_tokens == 80 + 8 * 2
    assert sorted(request.num_cached_tokens for request in requests) == [0] + [80] * 7
    assert all(request.output_token_ids == fake_answer(request)[0] for request in ended)


def test_waiting_for_a_shared_block_does_not_hold_back_strangers() -> None:
    bench = bench_of(num_blocks=100, budget=64, num_running=8)
    for name in ("first", "same"):
        bench.scheduler.add(request_of(name, [1] * 20))
    bench.scheduler.add(request_of("stranger", [2] * 20))
    bench.step()
    assert [item.request_id for item in bench.steps[0].scheduled] == ["first", "stranger"]
    bench.step()
    assert "same" in [item.request_id for item in bench.steps[1].scheduled]


def test_without_prefix_caching_nobody_waits_for_a_shared_block() -> None:
    """Requests with equal prompts were admitted one a step, though what they waited for could never be shared."""
    bench = bench_of(num_blocks=100, budget=256, num_running=8, prefix_caching=False)
    for i in range(6):
        bench.scheduler.add(request_of(f"r{i}", [1] * 20))
    bench.step()
    assert len(bench.steps[0].scheduled) == 6


def test_a_request_whose_shared_block_never_came_computes_it_itself() -> None:
    bench = bench_of(num_blocks=100, budget=8)
    bench.scheduler.add(request_of("first", [1] * 40))
    bench.scheduler.add(request_of("same", [1] * 40))
    bench.step()
    bench.scheduler.finish("first", FinishReason.ABORT)
    bench.step()
    assert [item.request_id for item in bench.steps[-1].scheduled] == ["same"]
    assert bench.steps[-1].scheduled[0].start == 8


def test_a_prefix_is_reused_when_a_sliding_group_has_only_its_last_window() -> None:
    bench = bench_of(num_blocks=40, layout=layout_of(None, 6), budget=8)
    bench.scheduler.add(request_of("first", [1] * 40, max_tokens=2))
    bench.run()
    evictor = request_of("evictor", [2] * 52, max_tokens=1)  # takes the six that left the window first
    bench.scheduler.add(evictor)
    bench.run()
    again = request_of("again", [1] * 40, max_tokens=2)
    bench.scheduler.add(again)
    bench.step()
    blocks = bench.steps[-1].scheduled[0].blocks
    assert blocks is not None
    first_slots = blocks.added[1]
    assert again.num_cached_tokens == 36
    assert [bool(block_id) for block_id in first_slots[:9]] == [False] * 7 + [True] * 2


def test_the_last_token_of_a_fully_cached_prompt_is_still_computed() -> None:
    bench = bench_of()
    for name in ("first", "again"):
        bench.scheduler.add(request_of(name, [1] * 8, max_tokens=1))
        bench.run()
    assert [step.num_tokens for step in bench.steps] == [8, 4]


def test_prompt_logprobs_compute_the_whole_prompt() -> None:
    bench = bench_of()
    bench.scheduler.add(request_of("first", [1] * 13, max_tokens=1))
    bench.run()
    request = request_of("second", [1] * 13, max_tokens=1, params=SamplingParams(prompt_logprobs=0))
    bench.scheduler.add(request)
    bench.run()
    assert request.num_cached_tokens == 0
    assert [step.num_tokens for step in bench.steps] == [13, 13]


def test_the_least_urgent_is_preempted_and_loses_no_token() -> None:
    bench = bench_of(num_blocks=8, budget=16, prefix_caching=False)
    requests = [request_of(name, [i] * 8, max_tokens=16, seed=i) for i, name in enumerate("abc")]
    requests[0].priority = 1
    bench.scheduler.add(requests[0])
    bench.step()
    for request in requests[1:]:
        bench.scheduler.add(request)
    ended = bench.run()
    assert requests[1].num_preemptions == 0
    assert requests[0].num_preemptions > 0
    assert bench.scheduler.counters.num_preemptions == sum(request.num_preemptions for request in requests)
    assert all((request.output_token_ids, request.finish_reason) == fake_answer(request) for request in ended)


def test_a_prompt_under_way_preempts_a_decode_that_was_scheduled_before_it() -> None:
    bench = bench_of(num_blocks=11, budget=4, num_running=2, prefix_caching=False)
    decode, prompt = request_of("decode", [1], 30), request_of("prompt", list(range(40)), 2, priority=-1)
    bench.scheduler.add(decode)
    bench.step()
    bench.scheduler.add(prompt)
    while not decode.num_preemptions:
        bench.step()
    assert [item.request_id for item in bench.steps[-1].scheduled] == ["prompt"]
    assert all((request.output_token_ids, request.finish_reason) == fake_answer(request) for request in bench.run())


def test_nothing_is_admitted_in_a_step_that_preempted() -> None:
    bench = bench_of(num_blocks=8, budget=64, num_running=3, prefix_caching=False)
    for i, name in enumerate("abc"):
        bench.scheduler.add(request_of(name, [i] * 7, max_tokens=20))
    bench.step()
    bench.scheduler.add(request_of("urgent", [9], priority=-1))
    num_preempted = 0
    while bench.scheduler.has_work:
        running = {request.request_id for request in bench.scheduler._running}
        bench.step()
        if bench.scheduler.counters.num_preemptions > num_preempted:
            num_preempted = bench.scheduler.counters.num_preemptions
            assert {item.request_id for item in bench.steps[-1].scheduled} <= running
            assert bench.steps[-1].released
    assert num_preempted


def test_what_the_last_one_running_gives_up_goes_to_a_more_urgent_one_at_once() -> None:
    """Regression: that step was empty, and an engine whose step was empty sleeps until somebody calls it."""
    bench = bench_of(num_blocks=10, budget=64, prefix_caching=False)
    bench.kv.borrow("of a peer", 4)
    low, urgent = request_of("low", [1] * 15, max_tokens=20, priority=1), request_of("urgent", [2] * 11)
    bench.scheduler.add(low)
    while low.num_tokens < 18:
        bench.step()
    bench.scheduler.add(urgent)
    while not low.num_preemptions:
        bench.step()
    assert [item.request_id for item in bench.steps[-1].scheduled] == ["urgent"]
    bench.kv.drop("of a peer")
    assert [request.request_id for request in bench.run()] == ["urgent", "low"]
    assert low.output_token_ids == fake_answer(low)[0]


def test_urgent_requests_go_first() -> None:
    bench = bench_of(num_running=1, budget=16)
    for name, priority in (("low", 1), ("first", 0), ("urgent", -1), ("second", 0)):
        bench.scheduler.add(request_of(name, [1], max_tokens=1, priority=priority))
    assert [request.request_id for request in bench.run()] == ["urgent", "first", "second", "low"]


def test_a_steady_stream_of_urgent_requests_delays_a_low_priority_one_only_so_long() -> None:
    aging_steps, priority = 7, 3
    bench = bench_of(num_running=1, budget=16, aging_steps=aging_steps)
    low = request_of("low", [9], max_tokens=1, priority=priority)
    bench.scheduler.add(low)
    num_steps = 0
    while low.state is not RequestState.FINISHED:
        bench.scheduler.add(request_of(f"urgent{num_steps}", [1], max_tokens=1))
        bench.step()
        num_steps += 1
    assert num_steps == aging_steps * priority + 1  # each step runs one


def test_one_that_lacks_blocks_holds_back_those_behind_it() -> None:
    bench = bench_of(num_blocks=10, budget=64)
    bench.scheduler.add(request_of("holder", [1] * 20, max_tokens=4))
    bench.step()
    bench.scheduler.add(request_of("large", [2] * 28, max_tokens=1))
    bench.scheduler.add(request_of("small", [3], max_tokens=1))
    bench.step()
    assert bench.scheduler.num_waiting == 2
    assert [request.request_id for request in bench.run()] == ["holder", "large", "small"]


def test_admission_keeps_the_watermark_unless_nothing_runs() -> None:
    bench = bench_of(num_blocks=10, budget=64, watermark_pages=4)
    bench.scheduler.add(request_of("whole", [1] * 30, max_tokens=2))
    bench.step()
    assert bench.scheduler.num_running == 1
    bench.run()
    bench.scheduler.add(request_of("half", [2] * 16, max_tokens=2))
    bench.scheduler.add(request_of("other", [3] * 12, max_tokens=2))
    bench.step()
    assert bench.scheduler.num_running == 1


def test_max_num_running_is_kept() -> None:
    bench = bench_of(num_running=2, budget=16)
    for i in range(5):
        bench.scheduler.add(request_of(f"r{i}", [i], max_tokens=3))
    bench.step()
    assert (bench.scheduler.num_running, bench.scheduler.num_waiting) == (2, 3)


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        ([], 1, "empty"),
        ([1], 0, "max_tokens=0"),
        ([1] * 30, 11, "exceed the context of 40"),
        ([1] * 30, 10, "do not fit into 8 KV blocks"),
    ],
)
def test_what_could_never_run_is_refused(prompt: list[int], max_tokens: int, message: str) -> None:
    """A prompt as long as the context left max_tokens=0, and one token too many was produced."""
    bench = bench_of(num_blocks=8, max_model_len=40)
    with pytest.raises(InvalidRequestError, match=message):
        bench.scheduler.add(request_of("bad", prompt, max_tokens))
    assert not bench.scheduler.has_work


def test_a_live_id_is_refused_and_a_finished_one_is_free_again() -> None:
    bench = bench_of()
    bench.scheduler.add(request_of("a", [1]))
    with pytest.raises(InvalidRequestError, match="in use"):
        bench.scheduler.add(request_of("a", [2]))
    bench.run()
    bench.scheduler.add(request_of("a", [2]))
    assert bench.scheduler.num_waiting == 1


def test_a_full_queue_refuses_and_an_abort_makes_room() -> None:
    bench = bench_of(num_waiting=2)
    bench.scheduler.add(request_of("a", [1]))
    bench.scheduler.add(request_of("b", [1]))
    with pytest.raises(CapacityError, match="2 requests are waiting"):
        bench.scheduler.add(request_of("c", [1]))
    bench.scheduler.finish("a", FinishReason.ABORT)
    bench.scheduler.add(request_of("c", [1]))


def test_released_ids_are_told_with_the_next_step_that_is_executed() -> None:
    """They were told with an empty step, which nobody executes: a reused id met the executor's old state."""
    bench = bench_of()
    bench.scheduler.add(request_of("a", [1]))
    bench.step()
    bench.scheduler.finish("a", FinishReason.ABORT)
    assert bench.scheduler.schedule().released == ()
    bench.scheduler.add(request_of("a", [2]))
    assert bench.scheduler.schedule().released == ("a",)
    assert bench.scheduler.schedule().released == ()


def test_an_error_ends_one_request_only() -> None:
    bench = bench_of(failing=frozenset({"bad"}))
    for name in ("bad", "good"):
        bench.scheduler.add(request_of(name, [1], max_tokens=2))
    ended = {request.request_id: request for request in bench.run()}
    assert (ended["bad"].finish_reason, ended["bad"].stop_reason) == (FinishReason.ERROR, "nothing can be chosen")
    assert ended["good"].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(("prompt", "sampled"), [([1], {}), ([1] * 9, {"a": [SampledToken(5)]})])
def test_an_executor_that_forgets_or_invents_a_token_is_a_bug(
    prompt: list[int], sampled: dict[str, list[SampledToken]]
) -> None:
    bench = bench_of(budget=8)
    bench.scheduler.add(request_of("a", prompt))
    with pytest.raises(AssertionError, match="token"):
        bench.scheduler.update(bench.scheduler.schedule(), ExecutorOutput(sampled, {}))


def decoding(bench: Bench, names: str, drafts: dict[str, list[int]]) -> None:
    """Requests that have one token each, and drafts."""
    for name in names:
        bench.scheduler.add(request_of(name, [1, 2], max_tokens=4))
    step = bench.scheduler.schedule()
    result = bench.execute(step)
    bench.scheduler.update(step, ExecutorOutput(result.sampled, {}, drafts))


def test_drafts_are_scheduled_behind_the_newest_token() -> None:
    bench = bench_of()
    decoding(bench, "a", {"a": [7, 8]})
    (item,) = bench.scheduler.schedule().scheduled
    assert (item.num_tokens, item.num_drafts, list(item.draft_token_ids), item.samples) == (3, 2, [7, 8], True)


def test_no_draft_lies_beyond_the_last_token() -> None:
    bench = bench_of()
    decoding(bench, "a", {"a": [7] * 9})
    assert bench.scheduler.schedule().scheduled[0].num_drafts == 2  # of max_tokens=4, one exists and one is chosen


def test_drafts_take_what_prompts_leave_of_the_budget() -> None:
    bench = bench_of(budget=8, num_running=4)
    decoding(bench, "a", {"a": [7, 8]})
    bench.scheduler.add(request_of("b", [1] * 6))
    first, second = bench.scheduler.schedule().scheduled
    assert (first.num_tokens, second.num_tokens) == (2, 6)


def test_drafts_preempt_nobody() -> None:
    bench = bench_of(num_blocks=2, layout=layout_of(None, block_size=8), budget=16, num_running=2, max_model_len=16)
    for name in "ab":
        bench.scheduler.add(request_of(name, [1, 2, 3, ord(name), 5, 6], max_tokens=8))
    step = bench.scheduler.schedule()
    result = bench.execute(step)
    bench.scheduler.update(step, ExecutorOutput(result.sampled, {}, {"a": [7] * 4}))
    assert [item.num_drafts for item in bench.scheduler.schedule().scheduled] == [0, 0]
    assert bench.scheduler.counters.num_preemptions == 0


def test_a_caller_can_end_a_request_at_any_token_of_a_step() -> None:
    """As a stop string does: nothing of the tokens behind it may count."""
    bench = bench_of()
    decoding(bench, "a", {"a": [7, 8]})
    request = bench.scheduler.get("a")
    assert request is not None
    taken: list[int] = []

    def stop(request: Request, token: SampledToken) -> None:
        taken.append(token.token_id)
        if len(taken) == 2:
            bench.scheduler.finish(request.request_id, FinishReason.STOP, "text")

    tokens = [SampledToken(token_id) for token_id in (7, 8, 9)]
    ended = bench.scheduler.update(bench.scheduler.schedule(), ExecutorOutput({"a": tokens}, {}), stop)
    assert (ended, taken, request.output_token_ids[1:]) == ([request], [7, 8], [7, 8])
    assert (request.finish_reason, request.stop_reason) == (FinishReason.STOP, "text")
    bench.scheduler.check()


def test_time_saved_is_each_requests_own_and_the_mean_of_all() -> None:
    """A step of 3 s in place of 2 s brought one request three tokens and the other one. The drafter took 0.5 s."""
    bench = bench_of()
    decoding(bench, "ab", {"a": [7, 8]})
    sampled = {"a": [SampledToken(7), SampledToken(8), SampledToken(9)], "b": [SampledToken(5)]}
    times = DraftTimes(drafter_s=0.5, plain_s=2.0, step_s=3.0)
    first, second = bench.scheduler.get("a"), bench.scheduler.get("b")
    assert first is not None
    assert second is not None
    bench.scheduler.update(bench.scheduler.schedule(), ExecutorOutput(sampled, {}, draft_times=times))
    assert first.tally.counts == DraftCounts(1, (1, 1), (1, 1), 2.5)
    assert second.tally.counts == DraftCounts(1, saved_s=-1.5)
    assert bench.scheduler.counters.drafts == DraftCounts(2, (1, 1), (1, 1), 0.5)


def test_time_saved_of_a_step_without_known_cost_is_the_drafters_loss() -> None:
    assert DraftTimes(drafter_s=0.5, step_s=3.0).saved_s(4) == -0.5


def test_counters_count_prompts_once() -> None:
    bench = bench_of(num_blocks=8, budget=16)
    for i, name in enumerate("aab"):
        bench.scheduler.add(request_of(f"{name}{i}", [ord(name)] * 9, max_tokens=20))
    bench.run()
    counters = bench.scheduler.counters
    assert counters.num_preemptions > 0
    assert (counters.num_prompt_tokens, counters.num_cached_prompt_tokens) == (27, 2 * BLOCK_SIZE)


def test_block_accounting_must_expect_chunks_of_the_budget() -> None:
    kv = KVCacheManager(layout_of(5), 32, max_chunk_tokens=8)
    with pytest.raises(AssertionError, match="smaller chunks"):
        Scheduler(bench_of(budget=16).scheduler.config, kv)
