"""Kinds of state that no model here has, through prefix cache, block manager and scheduler as they are: the seam that
families with latents and recurrent layers will use.
"""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.architecture.entry_states import EntriesSpec, EntryInputsSpec
from tandem.architecture.state import StateSpec
from tandem.core.events import BlockStored
from tandem.core.hashing import extend_hashes
from tandem.kvcache.manager import KVCacheManager
from tandem.kvcache.prefix import NULL_BLOCK, HashPrefixCache, longest_prefix
from tandem.kvcache.spec import KVLayout, build_layout
from tandem.scheduler.output import KVComputed
from tandem.scheduler.request import Request
from tests.helpers.fake_executor import Content, fake_answer, kv_of
from tests.helpers.layouts import BLOCK_SIZE
from tests.helpers.oracles import BlockOracle
from tests.helpers.requests import Bench, bench_of, request_of
from tests.helpers.toy_states import ATTENTION, LAYOUTS, StateExecutor, ToyLatentSpec, ToyRecurrentSpec, toy_layout
from tests.unit.scheduler.test_scheduler_stateful import LONGEST, Traffic, assert_nothing_is_held
from tests.unit.scheduler.test_sharing_stateful import Sharing

RECURRENT = ToyRecurrentSpec(4, 2 * BLOCK_SIZE)


def states_of(layout: KVLayout, *, acceptance: float | None = None, **options: int) -> Bench:
    bench = bench_of(layout=layout, **options)  # type: ignore[arg-type]
    bench.executor = StateExecutor(layout, acceptance)
    return bench


@pytest.mark.parametrize(
    ("spec", "per_token", "per_request"), [(ATTENTION, 64, 0), (ToyLatentSpec(6), 12, 0), (RECURRENT, 0, 40)]
)
def test_bytes_are_those_of_the_planes(spec: StateSpec, per_token: int, per_request: int) -> None:
    assert spec.bytes(0) == 0
    for num_tokens in (1, 7, 1000):
        assert spec.bytes(num_tokens) == num_tokens * per_token + per_request
    assert spec.block_bytes(16) == 16 * per_token + per_request
    assert build_layout([spec] * 3, 16).page_bytes == 3 * spec.block_bytes(16)


def test_what_is_bounded_comes_after_what_is_not() -> None:
    layout = build_layout([RECURRENT, ATTENTION, ToyLatentSpec(6)], 16)
    assert [group.spec.is_bounded for group in layout.groups] == [False, False, True]
    assert layout.is_bounded
    assert not layout.can_rewind
    assert build_layout([ATTENTION, ToyLatentSpec(6)], 16).can_rewind


@given(
    interval=st.integers(1, 40), block_size=st.sampled_from([4, 8]), first=st.integers(0, 20), count=st.integers(0, 20)
)
def test_only_where_a_checkpoint_was_taken(interval: int, block_size: int, first: int, count: int) -> None:
    blocks_apart = -(-interval // block_size)
    expected = [index for index in range(first, first + count) if (index + 1) % blocks_apart == 0]
    assert list(ToyRecurrentSpec(1, interval).publishable(first, first + count, block_size)) == expected


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@given(data=st.data())
def test_a_match_is_the_longest_that_all_groups_can_serve(layout: KVLayout, data: st.DataObject) -> None:
    hashes: list[bytes] = []
    extend_hashes(b"root", hashes, [1] * (12 * BLOCK_SIZE), BLOCK_SIZE)
    cache, oracle = HashPrefixCache(len(layout.groups), 1000), BlockOracle(layout, 1000)
    for group in range(len(layout.groups)):
        for index in layout.publishable(group, 0, 12):
            if data.draw(st.integers(0, 5)):
                block_id = 1 + 100 * group + index
                cache.insert(block_id, hashes[index], None, group)
                oracle.stored[group, hashes[index]] = block_id
    match = longest_prefix(cache, layout, hashes, 12)
    assert match.num_blocks == oracle.longest_match(hashes, 12 * BLOCK_SIZE + 1)
    for group, block_ids in enumerate(match.block_ids):
        first = layout.first_needed(group, match.num_blocks * BLOCK_SIZE)
        assert all(block_ids[first:]), "a block that the next query sees is missing"
        assert not any(block_ids[:first])


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("num_longest", [1, 2, 20])
def test_any_traffic_yields_the_same_tokens_and_leaves_nothing(layout: KVLayout, num_longest: int) -> None:
    """Chunks, prefix hits, preemption, aborts, drafts: the executor proves each state that is read."""
    num_finished = num_cached = num_preemptions = num_accepted = num_rejected = 0
    for seed in range(8):
        rng = random.Random(seed)
        budget = rng.choice((6, 16, 64))
        num_blocks = layout.blocks_for(LONGEST, budget) * num_longest
        acceptance = (None, 0.7, 0.0, 1.0)[seed % 4]
        bench = states_of(
            layout, num_blocks=num_blocks, budget=budget, num_running=6, max_model_len=LONGEST, acceptance=acceptance
        )
        traffic = Traffic(bench, rng)
        traffic.play(150)
        assert_nothing_is_held(bench)
        num_finished += traffic.num_finished
        num_cached += bench.scheduler.counters.num_cached_prompt_tokens
        num_preemptions += bench.scheduler.counters.num_preemptions
        num_accepted += bench.scheduler.counters.num_accepted
        num_rejected += bench.scheduler.counters.num_drafted - bench.scheduler.counters.num_accepted
    assert num_finished > 50
    assert num_cached > 0
    assert num_accepted > 50
    assert num_rejected > 50
    if num_longest == 1 and not layout.is_bounded:
        assert num_preemptions > 0, "the small pool was meant to force preemption"


class StateSharing(Sharing):
    """`Sharing` of blocks that may hold one state instead of one content a token."""

    def expected(self, request: Request, group: int, index: int, num_tokens: int) -> list[Content | None]:
        """Expected content of a block once `num_tokens` of its request's tokens are computed."""
        kv = kv_of(request.hash_root, request.token_ids[:num_tokens], group)
        if self.bench.kv.layout.groups[group].spec.can_rewind:
            return [*kv[index * BLOCK_SIZE : (index + 1) * BLOCK_SIZE]]
        return [kv[min((index + 1) * BLOCK_SIZE, num_tokens) - 1]] * BLOCK_SIZE

    def note_lease(self, update: KVComputed) -> None:
        lease, layout = self.leases[update.lease_id], self.bench.kv.layout
        assert update.num_tokens > lease.num_tokens
        lease.num_tokens = update.num_tokens
        last = -(-update.num_tokens // BLOCK_SIZE) - 1
        for group, found in enumerate(update.groups):
            for index, block_id in enumerate(found.block_ids, found.first_index):
                assert block_id != NULL_BLOCK
                # NOTE: a state that a chunk ended in, and the next one left behind, is of no use to a reader
                if index == last or index in layout.publishable(group, index, index + 1):
                    expected = self.expected(lease.request, group, index, update.num_tokens)
                    lease.blocks[block_id] = expected
                    held = self.bench.executor.read(block_id, len(expected))
                    assert held == expected, "leased before it was computed"

    def move(self) -> None:
        moving = [transfer for transfer in self.transfers if transfer.pending]
        if moving:
            transfer = self.rng.choice(moving)
            group, index, block_id = transfer.pending.pop()
            assert block_id != NULL_BLOCK
            content = self.expected(transfer.request, group, index, transfer.reserved.num_expected_tokens)
            if not transfer.is_told:
                transfer.arrived.add((group, index))
            else:  # NOTE: too late to count; garbage, so that whoever was given the block notices
                content = [(-1, -1)] * BLOCK_SIZE
            self.bench.executor.write(block_id, content)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("num_longest", [1, 3, 20])
def test_any_sharing_yields_the_same_tokens_and_leaves_nothing(layout: KVLayout, num_longest: int) -> None:
    """Leases that are read late, reservations that are filled late, in part or never, with the token before or after:
    a state that is past the position to be computed is not used.
    """
    num_finished = num_fetched = 0
    for seed in range(6):
        rng = random.Random(seed)
        budget = rng.choice((6, 16, 64))
        num_blocks = layout.blocks_for(LONGEST, budget) * num_longest
        bench = states_of(layout, num_blocks=num_blocks, budget=budget, num_running=6, max_model_len=LONGEST)
        sharing = StateSharing(bench, rng)
        sharing.play(400)
        usage = bench.kv.usage
        assert (usage.used, usage.leased, usage.transferring) == (0, 0, 0)
        assert bench.kv.num_unpromised == usage.total
        num_finished += sharing.num_finished
        num_fetched += sharing.num_fetched
    assert num_finished > 100
    assert num_fetched > 20


@pytest.mark.parametrize("num_pages", [56, 60, 64, 68])
def test_a_preempted_request_goes_on_from_its_last_whole_block(num_pages: int) -> None:
    """Its other state, behind a part of a block, is room enough for whoever pushed it out."""
    layout = toy_layout(ATTENTION, ToyRecurrentSpec(4, 10**6), pages_per_state=(1, 12))
    bench = states_of(layout, num_blocks=num_pages, budget=16, num_running=2)
    victim = request_of("victim", [1] * 13, max_tokens=30, priority=1)
    bench.scheduler.add(victim)
    bench.step()
    bench.scheduler.add(request_of("other", list(range(9)), max_tokens=39))
    while not victim.num_preemptions:
        bench.step()
    num_whole, num_steps = (victim.num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE, len(bench.steps)
    bench.run()
    later = (item for step in bench.steps[num_steps:] for item in step.scheduled)
    assert next(item.start for item in later if item.request_id == victim.request_id) == num_whole > 13
    assert (victim.output_token_ids, victim.finish_reason) == fake_answer(victim)


def mixture(rng: random.Random) -> KVLayout:
    """One to four kinds of layers in any order; where a recurrent one stores nothing of itself, checkpoints decide."""
    kinds: list[StateSpec] = [
        ATTENTION,
        replace(ATTENTION, window=rng.choice((3, 6, 13))),
        ToyLatentSpec(6),
        EntriesSpec(6, "float32", 10, 2),
        EntryInputsSpec(4, "float32", rng.choice((3, 8, 10)), rng.choice((1, 2))),
        ToyRecurrentSpec(4, 10**6),
        ToyRecurrentSpec(5, rng.choice((2, 3)) * BLOCK_SIZE),
    ]
    return toy_layout(*rng.sample(kinds, rng.randint(1, 4)))


@pytest.mark.parametrize("num_requests", [300, pytest.param(10_000, marks=pytest.mark.slow)])
def test_random_mixtures_of_layers_with_a_third_of_the_requests_aborted(num_requests: int) -> None:
    """Alone and with transfers and leases: the executor proves each state that is read, and nothing is left."""
    num_finished = num_cached = num_fetched = num_added = seed = 0
    while num_added <= num_requests:
        rng = random.Random(seed)
        seed += 1
        layout, budget = mixture(rng), rng.choice((6, 16, 64))
        num_blocks = layout.blocks_for(LONGEST, budget) * rng.choice((1, 2, 20))
        options = {"num_blocks": num_blocks, "budget": budget, "num_running": 6, "max_model_len": LONGEST}
        bench = states_of(layout, acceptance=(None, 0.7)[seed % 2], **options)
        traffic = Traffic(bench, rng)
        traffic.play(120)
        assert_nothing_is_held(bench)
        sharing = StateSharing(states_of(layout, **options), rng)
        sharing.play(200)
        usage = sharing.bench.kv.usage
        assert (usage.used, usage.leased, usage.transferring) == (0, 0, 0)
        num_added += traffic.num_added
        num_finished += traffic.num_finished
        num_cached += bench.scheduler.counters.num_cached_prompt_tokens
        num_fetched += sharing.num_fetched
    assert 0.2 < 1 - num_finished / num_added < 0.6
    assert num_cached > 1000
    assert num_fetched > 30


def test_pages_are_nearly_full_though_a_state_is_as_large_as_many_layers_of_keys() -> None:
    """Two of 8190 bytes take a page, or 32 blocks of K and V of 512 bytes."""
    large = ToyRecurrentSpec(819, 2 * BLOCK_SIZE)
    layout = build_layout([large if layer % 9 == 0 else ATTENTION for layer in range(36)], 8)
    assert [group.spec for group in layout.groups] == [ATTENTION, large]
    assert [len(group.layers) for group in layout.groups] == [32, 4]
    assert [group.pages_per_block for group in layout.groups] == [1, 2]
    assert layout.page_bytes == 32 * ATTENTION.block_bytes(8) == 16_384


def test_only_blocks_that_are_kept_take_memory() -> None:
    """A chunk of ten blocks with a checkpoint at every third takes four: three checkpoints and the state it ends in, to
    be found as long as the owner sees it.
    """
    layout, stored = toy_layout(ToyRecurrentSpec(4, 3 * BLOCK_SIZE), pages_per_state=(1,)), list[BlockStored]()
    kv = KVCacheManager(layout, 24, max_chunk_tokens=40, emit=stored.append)  # type: ignore[arg-type]
    hashes: list[bytes] = []
    extend_hashes(b"root", hashes, [1] * 40, BLOCK_SIZE)
    table = kv.admit("a", kv.match(hashes, 41), hashes, 41)
    assert kv.grow("a", 0, 40)
    assert [block_id != NULL_BLOCK for block_id in table.groups[0]] == [i in (2, 5, 8, 9) for i in range(10)]
    kv.commit("a", hashes, 40)
    assert [event.block_hash for event in stored] == [hashes[i] for i in (2, 5, 8, 9)]
    assert kv.match(hashes, 41).num_blocks == 10
    assert kv.grow("a", 40, 41)
    assert kv.usage.used == 2, "beside the state after 40 tokens and the next one something is kept"
    assert kv.usage.cached == 3
    kv.check()
    extend_hashes(b"root", hashes, [1] * 45, BLOCK_SIZE)
    assert kv.grow("a", 41, 45)
    assert kv.match(hashes, 41).num_blocks == 9
    kv.release("a")
    assert kv.pinned.pin(hashes, 60.0) == 9
    kv.check()
