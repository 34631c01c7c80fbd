"""Random adds and aborts against the fake executor: same tokens whatever was chunked, cached or preempted; no leak."""

import random
from dataclasses import dataclass, field

import pytest

from tandem.core.errors import CapacityError, InvalidRequestError
from tandem.core.sampling_params import SamplingParams
from tandem.core.types import FinishReason
from tandem.kvcache.spec import KVLayout
from tandem.scheduler.request import Request
from tests.helpers.fake_executor import VOCAB_SIZE, fake_answer
from tests.helpers.layouts import layout_of
from tests.helpers.requests import Bench, bench_of, request_of

LAYOUTS = {
    "full": layout_of(None),
    "full+sliding": layout_of(None, 6),
    "sliding": layout_of(5, 9),
    "full+2 sliding": layout_of(None, 4, 13),
}

LONGEST = 80


@dataclass
class Traffic:
    """A seeded user: says what to add and abort, and checks every answer."""

    bench: Bench
    rng: random.Random
    abort_share: float = 0.3
    live: dict[str, Request] = field(default_factory=dict)
    num_added: int = 0
    num_finished: int = 0
    log: list[tuple[str, tuple[int, ...]]] = field(default_factory=list)

    def prompt(self) -> list[int]:
        shared = [self.rng.randrange(2)] * self.rng.choice((0, 4, 9, 16, 30, 40))
        return shared + [self.rng.randrange(3) for _ in range(self.rng.randint(1, 12))]

    def request(self) -> Request:
        params = SamplingParams(
            min_tokens=self.rng.choice((0, 0, 1)),
            stop_token_ids=(self.rng.randrange(VOCAB_SIZE),),
            ignore_eos=self.rng.random() < 0.3,
            prompt_logprobs=0 if self.rng.random() < 0.1 else None,
        )
        return request_of(
            f"r{self.num_added}",
            self.prompt(),
            self.rng.randint(1, 24),
            seed=self.rng.getrandbits(40),
            priority=self.rng.choice((0, 0, 0, 1, 2, -1)),
            root=self.rng.choice((b"a", b"b")),
            eos=frozenset({3, 4}),
            params=params,
        )

    def add(self) -> None:
        request = self.request()
        self.num_added += 1
        try:
            self.bench.scheduler.add(request)
        except CapacityError:
            assert self.bench.scheduler.num_waiting >= self.bench.scheduler.config.max_num_waiting
        else:
            self.live[request.request_id] = request

    def add_bad(self) -> None:
        kind = self.rng.randrange(4)
        bad = request_of("bad", [] if kind == 0 else [1], 10_000 if kind == 1 else 0 if kind == 2 else 600)
        before = self.bench.scheduler.num_waiting
        with pytest.raises(InvalidRequestError):
            self.bench.scheduler.add(bad)
        assert self.bench.scheduler.num_waiting == before

    def abort(self) -> None:
        request_id = self.rng.choice(sorted(self.live))
        request = self.live.pop(request_id)
        assert self.bench.scheduler.finish(request_id, FinishReason.ABORT) is request
        assert self.bench.scheduler.finish(request_id, FinishReason.ABORT) is None
        assert request.output_token_ids == fake_answer(request)[0][: request.num_output_tokens]

    def step(self) -> None:
        output = self.bench.scheduler.schedule()
        if self.live and self.rng.random() < self.abort_share / 3:
            self.abort()  # between deciding and executing
        result = self.bench.execute(output)
        if self.live and self.rng.random() < self.abort_share / 3:
            self.abort()  # between executing and updating
        self.settle(self.bench.scheduler.update(output, result))
        self.bench.scheduler.check()

    def settle(self, ended: list[Request]) -> None:
        for request in ended:
            del self.live[request.request_id]
            assert (request.output_token_ids, request.finish_reason) == fake_answer(request)
            self.log.append((request.request_id, tuple(request.token_ids)))
            self.num_finished += 1

    def play(self, num_actions: int) -> None:
        for _ in range(num_actions):
            chance = self.rng.random()
            if chance < 0.3:
                self.add()
            elif chance < 0.32:
                self.add_bad()
            elif chance < 0.32 + self.abort_share / 5 and self.live:
                self.abort()
            elif chance < 0.5:
                self.step()
            else:
                self.settle(self.bench.step())
        self.settle(self.bench.run())
        assert not self.live


def assert_nothing_is_held(bench: Bench) -> None:
    usage = bench.kv.usage
    assert not bench.scheduler.has_work
    assert usage.used == 0
    assert usage.free + usage.cached == usage.total
    assert bench.scheduler.num_waiting == bench.scheduler.num_running == 0


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("prefix_caching", [True, False], ids=["cached", "cold"])
@pytest.mark.parametrize("num_longest", [1, 2, 20])
def test_any_traffic_yields_the_same_tokens_and_leaves_nothing(
    layout: KVLayout, prefix_caching: bool, num_longest: int
) -> None:
    num_preemptions = num_cached = num_finished = num_accepted = num_rejected = 0
    for seed in range(8):
        rng = random.Random(seed)
        budget = rng.choice((6, 16, 64))
        bench = bench_of(
            num_blocks=layout.blocks_for(LONGEST, budget) * num_longest,
            layout=layout,
            budget=budget,
            num_running=6,
            num_waiting=rng.choice((3, 1000)),
            max_model_len=LONGEST,
            prefix_caching=prefix_caching,
            watermark_pages=rng.choice((0, 2)),
            acceptance=(None, 0.7, 0.0, 1.0)[seed % 4],
        )
        traffic = Traffic(bench, rng)
        traffic.play(150)
        assert_nothing_is_held(bench)
        num_finished += traffic.num_finished
        num_preemptions += bench.scheduler.counters.num_preemptions
        num_cached += bench.scheduler.counters.num_cached_prompt_tokens
        num_accepted += bench.scheduler.counters.num_accepted
        num_rejected += bench.scheduler.counters.num_drafted - bench.scheduler.counters.num_accepted
    assert num_finished > 50
    assert num_accepted > 50
    assert num_rejected > 50
    assert (num_cached > 0) == prefix_caching
    if num_longest == 1 and not layout.is_bounded:
        assert num_preemptions > 0, "the small pool was meant to force preemption"


def test_the_same_calls_give_the_same_steps() -> None:
    def played() -> tuple[list[tuple[str, tuple[int, ...]]], list[list[tuple[str, int, bool]]]]:
        bench = bench_of(num_blocks=40, layout=layout_of(None, 6), num_running=6, max_model_len=LONGEST)
        traffic = Traffic(bench, random.Random(5))
        traffic.play(300)
        steps = [
            [(item.request_id, item.num_tokens, item.blocks is not None) for item in step.scheduled]
            for step in bench.steps
        ]
        return traffic.log, steps

    assert played() == played()


def test_ten_thousand_requests_with_aborts_leave_nothing_allocated() -> None:
    rng = random.Random(1)
    bench = bench_of(num_blocks=300, layout=layout_of(None, 9), budget=256, num_running=64, checks_kv=False)
    traffic = Traffic(bench, rng)
    num_aborted = 0
    while traffic.num_added < 10_000:
        for _ in range(rng.randint(0, 40)):
            traffic.add()
            if rng.random() < 0.3:
                traffic.abort()
                num_aborted += 1
        output = bench.scheduler.schedule()
        traffic.settle(bench.scheduler.update(output, bench.execute(output)))
    traffic.settle(bench.run())
    assert num_aborted > 2_500
    assert traffic.num_finished == traffic.num_added - num_aborted
    assert_nothing_is_held(bench)
