"""Places where constant states are kept, and the blocks that keeping them may take."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.core.events import BlockEvent, BlockEventSink, BlockRemoved
from tandem.core.hashing import extend_hashes
from tandem.kvcache.checkpoints import checkpoint_blocks
from tandem.kvcache.manager import KVCacheManager
from tandem.kvcache.tiers import HostMove
from tests.helpers.layouts import BLOCK_SIZE
from tests.helpers.toy_states import ATTENTION, ToyRecurrentSpec, toy_layout

FAR = ToyRecurrentSpec(4, 10**6)  # nothing is kept of itself


@pytest.mark.parametrize(
    ("num_tokens", "breakpoints", "expected"),
    [
        (15, (), set()),  # no whole block
        (16, (), set()),  # a whole block, and no token left to compute
        (17, (), {16}),
        (100, (), {96}),
        (100, (40, 64, 7, 1000), {32, 64, 96}),
        (96, (96,), {80, 96}),
        (3000, (), {1024, 2048, 2992}),
        (9000, (), {2048, 4096, 6144, 8192, 8992}),
        (100_000, (), {16384 * n for n in range(1, 7)} | {99984}),
    ],
)
def test_the_end_of_a_prompt_its_breakpoints_and_a_few_between(
    num_tokens: int, breakpoints: tuple[int, ...], expected: set[int]
) -> None:
    found = checkpoint_blocks(num_tokens, breakpoints, 16)
    assert {(index + 1) * 16 for index in found} == expected


@given(st.integers(1, 10**6), st.integers(1, 10**6), st.sampled_from([8, 16, 128]))
def test_a_longer_prompt_keeps_at_most_eight_between_all_of_which_a_shorter_one_keeps(
    one: int, other: int, block_size: int
) -> None:
    shorter, longer = sorted((one, other))
    few, many = (checkpoint_blocks(n, (), block_size) for n in (longer, shorter))
    assert len(few) <= 9
    ends = {(n - 1) // block_size - 1 for n in (longer, shorter)}
    assert {index for index in few - ends if index < min(ends)} <= many


def chain_of(num_tokens: int, letter: int) -> list[bytes]:
    hashes: list[bytes] = []
    extend_hashes(b"root", hashes, [letter] * num_tokens, BLOCK_SIZE)
    return hashes


def computed(
    kv: KVCacheManager, owner: str, num_tokens: int, letter: int, breakpoints: Sequence[int] = (), chunk: int = 8
) -> None:
    hashes = chain_of(num_tokens, letter)
    checkpoints = checkpoint_blocks(num_tokens, breakpoints, BLOCK_SIZE)
    match = kv.match(hashes, num_tokens)
    kv.admit(owner, match, hashes, num_tokens, checkpoints=checkpoints)
    for start in range(match.num_blocks * BLOCK_SIZE, num_tokens, chunk):
        end = min(start + chunk, num_tokens)
        assert kv.grow(owner, start, end)
        kv.commit(owner, hashes, end)
        kv.check()


def test_idle_states_take_no_more_than_half_of_the_pool() -> None:
    kv = KVCacheManager(toy_layout(FAR, pages_per_state=(1,)), 12, max_chunk_tokens=8)
    for letter in range(10):
        computed(kv, "a", 30, letter)
        kv.release("a")
        kv.check()
        assert kv.usage.cached <= 6
    assert kv.match(chain_of(30, 9), 30).num_blocks == 7
    assert kv.match(chain_of(30, 0), 30).num_blocks == 0, "the oldest goes first"


def test_a_checkpoint_takes_no_block_that_was_promised() -> None:
    """Beside an owner that was promised two of three blocks, another keeps no state but its own."""
    kv = KVCacheManager(toy_layout(FAR, pages_per_state=(1,)), 3, max_chunk_tokens=8)
    hashes = chain_of(41, 1)
    kv.admit("promised", kv.match(hashes, 41), hashes, 41)
    assert kv.num_unpromised == 1
    computed(kv, "a", 7, 2)
    assert kv.usage.used == 1
    kv.release("a")
    kv.release("promised")
    computed(kv, "a", 7, 2)
    assert kv.usage.used == 2, "there was room for it"


@pytest.mark.parametrize("chunk", [1, 3, 4, 5, 8])
def test_an_owner_is_promised_no_more_states_than_it_holds_at_once(chunk: int) -> None:
    """The one that it goes on from, and the one in which it stops: two are enough to its end."""
    kv = KVCacheManager(toy_layout(FAR, pages_per_state=(1,)), 2, max_chunk_tokens=chunk)
    assert kv.fits(41)
    most = 0
    kv.admit("a", kv.match([], 41), [], 41)
    for start in range(0, 41, chunk):
        assert kv.grow("a", start, min(start + chunk, 41))
        most = max(most, kv.usage.used)
    assert most == 2


def test_a_prefix_that_was_found_is_found_again_by_others() -> None:
    """Its owner went on from there and sees it no more."""
    kv = KVCacheManager(toy_layout(FAR, pages_per_state=(1,)), 24, max_chunk_tokens=8)
    computed(kv, "a", 21, 1)
    kv.release("a")
    computed(kv, "b", 45, 1)
    kv.release("b")
    hashes = chain_of(45, 1)
    assert [kv.match(hashes[:n], 100).num_blocks for n in (5, 6, 10, 11)] == [5, 5, 5, 11]


def test_a_state_is_kept_where_a_prompt_parts_from_another() -> None:
    """Of five shared blocks the second prompt finds none, since the first one's states there are gone, and the third
    and the fourth find all.
    """
    kv = KVCacheManager(toy_layout(ATTENTION, FAR, pages_per_state=(1,)), 200, max_chunk_tokens=8)
    shared, found = chain_of(5 * BLOCK_SIZE, 1), list[int]()
    for number in range(4):
        hashes = shared.copy()
        extend_hashes(b"root", hashes, [1] * 5 * BLOCK_SIZE + [2 + number] * 21, BLOCK_SIZE)
        match = kv.match(hashes, 41)
        found.append(match.num_blocks)
        kv.admit("a", match, hashes, 41, checkpoints=frozenset({9}))
        for start in range(match.num_blocks * BLOCK_SIZE, 41, 8):
            assert kv.grow("a", start, min(start + 8, 41))
            kv.commit("a", hashes, min(start + 8, 41))
            kv.check()
        kv.release("a")
    assert found == [0, 0, 5, 5]


def test_a_pin_at_a_breakpoint_keeps_its_state_as_a_block() -> None:
    """Three blocks of K and V and the one state behind them, until the pin's deadline."""
    kv = KVCacheManager(toy_layout(ATTENTION, FAR, pages_per_state=(1,)), 24, max_chunk_tokens=8)
    computed(kv, "a", 33, 1, breakpoints=(14,))
    hashes = chain_of(33, 1)
    assert kv.pinned.pin(hashes[:3], 60.0) == 3
    assert kv.pinned.pin(hashes[:5], 60.0) == 3, "there is no state after the fifth block"
    kv.release("a")
    assert kv.usage.pinned == 4
    kv.pinned.tell_time(61.0)
    assert kv.usage.pinned == 0
    kv.check()


def idle_prefixes(emit: BlockEventSink | None = None) -> KVCacheManager:
    """A pool full of four prefixes: a block of K and V and a state each. The first two are cached, the others pinned;
    no more than two states are cached.
    """
    layout = toy_layout(ATTENTION, FAR, pages_per_state=(4,))
    kv = KVCacheManager(layout, 20, max_chunk_tokens=4, pin_share=1.0, emit=emit)
    for letter in range(4):
        computed(kv, "a", 4, letter, chunk=4)
        assert letter < 2 or kv.pinned.pin(chain_of(4, letter), 60.0) == 1
        kv.release("a")
    assert (kv.usage.cached, kv.usage.pinned) == (10, 10)
    return kv


def found(kv: KVCacheManager) -> list[int]:
    return [kv.match(chain_of(4, letter), 5).num_blocks for letter in range(4)]


@pytest.mark.parametrize("letter", [0, 2], ids=["cached", "pinned"])
def test_room_is_not_made_of_the_prefix_that_it_is_made_for(letter: int) -> None:
    """Regression: states whose pins were broken displaced the found one, and its owner was given a free block."""
    kv, hashes = idle_prefixes(), chain_of(32, letter)
    match = kv.match(hashes, 32)
    assert match.num_blocks == 1
    assert not kv.can_admit(match, 32)
    assert kv.make_room(match, 32)
    assert [(group, hashes[0]) in kv.pinned.blocks for group in range(2)] == [letter == 2] * 2
    kv.admit("a", match, hashes, 32)
    kv.check()
    assert found(kv)[letter] == 1


def test_states_whose_time_is_over_displace_no_other() -> None:
    """Regression: the oldest idle states went in place of these."""
    kv = idle_prefixes()
    kv.pinned.tell_time(60.0)
    kv.check()
    assert found(kv) == [1, 1, 0, 0]


def test_the_end_of_a_state_in_both_tiers_is_told_once() -> None:
    events, moves = list[BlockEvent](), list[HostMove]()
    kv = idle_prefixes(events.append)
    kv.pinned.blocks.attach_host(10, moves.append)
    kv.pinned.blocks.yield_blocks(10, must=False)
    for letter in (2, 3):  # NOTE: used while they move, so they stay in the pool too
        assert kv.pinned.pin(chain_of(4, letter), 60.0) == 1
    for move in moves:
        kv.pinned.blocks.end_move(move.move_id, is_copied=True)
    assert (kv.usage.pinned, kv.pinned.blocks.usage.num_host) == (10, 10)
    kv.pinned.tell_time(60.0)
    kv.check()
    told = [(event.group, event.block_hash) for event in events if isinstance(event, BlockRemoved)]
    assert sorted(told) == sorted((1, chain_of(4, letter)[0]) for letter in (2, 3))
