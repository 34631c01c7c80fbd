"""Random traffic of requests whose KV comes from elsewhere or is leased, with transfers that write and read late.

The fake arena proves what no account can: that no reserved or leased block was given to anybody else meanwhile.
"""

import random
from dataclasses import dataclass, field

import pytest

from tandem.core.sampling_params import SamplingParams
from tandem.core.types import FinishReason
from tandem.kvcache.spec import KVLayout
from tandem.scheduler.output import KVComputed, KVReserved
from tandem.scheduler.request import Handoff, Request, RequestState
from tests.helpers.fake_executor import Content, fake_answer, fake_token, kv_of
from tests.helpers.layouts import BLOCK_SIZE, layout_of
from tests.helpers.requests import Bench, bench_of, request_of

LAYOUTS = {"full": layout_of(None), "full+sliding": layout_of(None, 6), "sliding": layout_of(5, 9)}
LONGEST = 60


@dataclass
class Transfer:
    """Fills the blocks reserved for one request, in any order, and goes on after the request has ended."""

    reserved: KVReserved
    request: Request
    pending: list[tuple[int, int, int]]  # group, index in the table, block id
    arrived: set[tuple[int, int]] = field(default_factory=set)
    is_told: bool = False

    @property
    def num_arrived(self) -> int:
        missing = [index for group, index, _ in self.entries if (group, index) not in self.arrived]
        if not missing:
            return self.reserved.num_expected_tokens
        return max(self.reserved.num_held_tokens, min(missing) * BLOCK_SIZE)

    @property
    def entries(self) -> list[tuple[int, int, int]]:
        return [
            (group, found.first_index + i, block_id)
            for group, found in enumerate(self.reserved.groups)
            for i, block_id in enumerate(found.block_ids)
        ]


@dataclass
class Lease:
    """Blocks that a peer may read at any time until it releases them."""

    request: Request
    blocks: dict[int, list[Content | None]] = field(default_factory=dict)
    num_tokens: int = 0


@dataclass
class Sharing:
    """A seeded peer of the scheduler: moves KV, tokens and events, and checks where each is."""

    bench: Bench
    rng: random.Random
    live: dict[str, Request] = field(default_factory=dict)
    transfers: list[Transfer] = field(default_factory=list)
    leases: dict[str, Lease] = field(default_factory=dict)
    reserved: set[str] = field(default_factory=set)
    given_up: set[str] = field(default_factory=set)
    num_added: int = 0
    num_finished: int = 0
    num_fetched: int = 0
    num_failed: int = 0

    def add(self) -> None:
        prompt = [self.rng.randrange(2)] * self.rng.choice((0, 4, 9, 16, 30)) + [
            self.rng.randrange(3) for _ in range(self.rng.randint(1, 9))
        ]
        name, seed = f"r{self.num_added}", self.rng.getrandbits(40)
        self.num_added += 1
        max_tokens = self.rng.randint(1, 16)
        resumed = [fake_token(seed, len(prompt) + i) for i in range(min(self.rng.choice((0, 0, 3)), max_tokens - 1))]
        kind = self.rng.choice(("whole", "fetch", "fetch", "prefix", "lease"))
        num_known = len(prompt) + len(resumed)
        handoff = Handoff(
            tuple(resumed),
            num_expected_tokens={"fetch": num_known, "prefix": (num_known - 1) // 4 * 4}.get(kind, 0),
            lease_id=f"lease of {name}" if kind in ("lease", "prefix") else None,
        )
        if handoff.lease_id is not None:
            max_tokens = len(resumed) + 1
        params = SamplingParams(ignore_eos=True)
        request = request_of(name, prompt, max_tokens, seed=seed, params=params, root=self.rng.choice((b"a", b"b")))
        request = Request(name, prompt, params, seed, request.hash_root, frozenset(), max_tokens, 0, handoff)
        self.bench.scheduler.add(request)
        self.live[name] = request
        if handoff.lease_id is not None:
            self.leases[handoff.lease_id] = Lease(request)

    def step(self) -> None:
        output = self.bench.scheduler.schedule()
        self.take_kv_events()
        for request in self.live.values():
            is_expecting = request.handoff.num_expected_tokens and request.request_id not in self.given_up
            if is_expecting and request.was_admitted:
                assert request.request_id in self.reserved, "whoever brings the KV was not told where to, or not to"
        for request in self.bench.scheduler.take_failed():
            assert request.handoff.lease_id is not None
            self.num_failed += 1
            del self.live[request.request_id]
        self.settle(self.bench.scheduler.update(output, self.bench.execute(output)))
        self.take_kv_events()

    def settle(self, ended: list[Request]) -> None:
        for request in ended:
            del self.live[request.request_id]
            assert request.output_token_ids == fake_answer(request)[0]
            self.num_finished += 1

    def take_kv_events(self) -> None:
        for news in self.bench.scheduler.take_kv_events():
            if isinstance(news, KVReserved):
                assert news.request_id not in self.reserved, "a request was given a second reservation"
                self.reserved.add(news.request_id)
                transfer = Transfer(news, self.live[news.request_id], [])
                transfer.pending = transfer.entries
                self.rng.shuffle(transfer.pending)
                self.transfers.append(transfer)
            elif isinstance(news, KVComputed):
                self.note_lease(news)

    def note_lease(self, news: KVComputed) -> None:
        lease = self.leases[news.lease_id]
        assert news.num_tokens > lease.num_tokens
        assert news.is_last == (news.num_tokens == lease.request.num_prompt_tokens + lease.request.num_resumed_tokens)
        lease.num_tokens = news.num_tokens
        for group, found in enumerate(news.groups):
            kv = kv_of(lease.request.hash_root, lease.request.token_ids[: news.num_tokens], group)
            for i, block_id in enumerate(found.block_ids):
                start = (found.first_index + i) * BLOCK_SIZE
                expected: list[Content | None] = [*kv[start : start + BLOCK_SIZE]]
                lease.blocks[block_id] = expected
                assert self.bench.executor.read(block_id, len(expected)) == expected, "leased before it was computed"

    def move(self) -> None:
        """A block arrives, whether its request still lives or not."""
        moving = [transfer for transfer in self.transfers if transfer.pending]
        if moving:
            transfer = self.rng.choice(moving)
            group, index, block_id = transfer.pending.pop()
            request = transfer.request
            kv = kv_of(request.hash_root, request.token_ids[: transfer.reserved.num_expected_tokens], group)
            content: list[Content | None] = [*kv[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE]]
            if not transfer.is_told:
                transfer.arrived.add((group, index))
            else:  # NOTE: too late to count; garbage, so that whoever was given the block notices
                content = [(-1, -1)] * BLOCK_SIZE
            self.bench.executor.write(block_id, content)

    def coming(self) -> None:
        """Some KV is there to be shared, or the worker that computes it has begun."""
        untold = [transfer.request for transfer in self.transfers if not transfer.is_told]
        arrived = {transfer.request.request_id: transfer.num_arrived for transfer in self.transfers}
        begun = [request for request in (*untold, *self.live.values()) if request.is_computed_elsewhere]
        if begun:
            name = self.rng.choice(begun).request_id
            self.bench.scheduler.note_kv_offered(name, arrived.get(name, 0))

    def tell(self) -> None:
        """No more KV will come, all of it or not."""
        untold = [transfer for transfer in self.transfers if not transfer.is_told]
        if untold:
            transfer = self.rng.choice(untold)
            if transfer.pending and self.rng.random() < 0.7:
                return
            transfer.is_told = True
            self.num_fetched += not transfer.pending
            self.bench.scheduler.note_kv_ended(transfer.request.request_id, transfer.num_arrived)
            self.take_kv_events()

    def give_up_early(self) -> None:
        """The peer failed before the request was admitted."""
        waiting = [r for r in self.live.values() if r.state is RequestState.WAITING and r.num_expected_tokens]
        if waiting:
            name = self.rng.choice(waiting).request_id
            self.given_up.add(name)
            self.bench.scheduler.note_kv_ended(name, 0)

    def end_transfer(self) -> None:
        """It is over, so its blocks may be reused."""
        over = [transfer for transfer in self.transfers if transfer.is_told and not transfer.pending]
        if over:
            transfer = self.rng.choice(over)
            self.transfers.remove(transfer)
            self.bench.kv.drop(transfer.reserved.fetch_id)

    def token(self) -> None:
        """Early, late, twice: it counts at most once."""
        if self.live:
            request = self.live[self.rng.choice(sorted(self.live))]
            position = request.num_prompt_tokens + request.num_resumed_tokens
            before = request.num_tokens
            taken = self.bench.scheduler.take_token(request.request_id, fake_token(request.seed, position + 0))
            assert request.num_tokens == before + (taken is not None)
            assert taken is None or before == position
            if request.finish_reason is not None:
                self.settle([request])

    def abort(self) -> None:
        if self.live:
            request = self.live.pop(self.rng.choice(sorted(self.live)))
            assert self.bench.scheduler.finish(request.request_id, FinishReason.ABORT) is request
            assert request.output_token_ids == fake_answer(request)[0][: request.num_output_tokens]

    def read_leases(self) -> None:
        for lease in self.leases.values():
            for block_id, expected in lease.blocks.items():
                assert self.bench.executor.read(block_id, len(expected)) == expected, "a leased block was reused"

    def end_lease(self) -> None:
        over = [name for name, lease in self.leases.items() if lease.request.finish_reason is not None]
        if over:
            name = self.rng.choice(over)
            del self.leases[name]
            self.bench.kv.drop(name)

    def play(self, num_actions: int) -> None:
        actions = [self.add, self.step, self.step, self.step, self.move, self.move, self.move, self.tell, self.token]
        actions += [self.end_transfer, self.end_lease, self.abort, self.give_up_early, self.add, self.tell, self.coming]
        weights = [3, 4, 4, 4, 6, 6, 6, 3, 2, 2, 2, 1, 1, 3, 3, 2]
        for action in self.rng.choices(actions, weights, k=num_actions):
            action()
            self.read_leases()
            self.bench.scheduler.check()
        for _ in range(5000):
            if not (self.live or self.transfers or self.leases):
                return
            for action in (self.move, self.tell, self.end_transfer, self.end_lease, self.step):
                action()
            self.bench.scheduler.check()
        raise AssertionError(f"{sorted(self.live)} never ended")


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("prefix_caching", [True, False], ids=["cached", "cold"])
@pytest.mark.parametrize("num_longest", [1, 3, 20])
def test_any_sharing_yields_the_same_tokens_and_leaves_nothing(
    layout: KVLayout, prefix_caching: bool, num_longest: int
) -> None:
    num_finished = num_fetched = num_failed = 0
    for seed in range(6):
        rng = random.Random(seed)
        budget = rng.choice((6, 16, 64))
        bench = bench_of(
            num_blocks=layout.blocks_for(LONGEST, budget) * num_longest,
            layout=layout,
            budget=budget,
            num_running=6,
            max_model_len=LONGEST,
            prefix_caching=prefix_caching,
            watermark_pages=rng.choice((0, 2)),
        )
        sharing = Sharing(bench, rng)
        sharing.play(400)
        usage = bench.kv.usage
        assert (usage.used, usage.leased, usage.transferring) == (0, 0, 0)
        assert bench.kv.num_unpromised == usage.total
        num_finished += sharing.num_finished
        num_fetched += sharing.num_fetched
        num_failed += sharing.num_failed
    assert num_finished > 100
    assert num_fetched > 20
