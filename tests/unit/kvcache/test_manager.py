"""Single promises of the block manager; random histories are in `test_manager_stateful`."""

import sys
from array import array
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any, ClassVar

import pytest

from tandem.core.events import BlockEvent, BlockStored
from tandem.core.hashing import extend_hashes
from tandem.kvcache.block_table import BlockRange, BlockTable
from tandem.kvcache.manager import KVCacheManager
from tandem.kvcache.prefix import STRETCH_BLOCKS
from tests.helpers.layouts import BLOCK_SIZE, layout_of


def manager_of(
    num_blocks: int,
    *windows: int | None,
    chunk: int = 8,
    prefix_caching: bool = True,
    watermark_pages: int = 0,
    emit: Callable[[BlockEvent], None] | None = None,
) -> KVCacheManager:
    return KVCacheManager(
        layout_of(*windows),
        num_blocks,
        max_chunk_tokens=chunk,
        prefix_caching=prefix_caching,
        watermark_pages=watermark_pages,
        emit=emit,
    )


def chain(token_ids: list[int]) -> list[bytes]:
    hashes: list[bytes] = []
    extend_hashes(b"root", hashes, token_ids, BLOCK_SIZE)
    return hashes


def admitted(manager: KVCacheManager, owner: str, token_ids: list[int]) -> BlockTable:
    match = manager.match(chain(token_ids), len(token_ids))
    assert manager.can_admit(match, len(token_ids))
    return manager.admit(owner, match, chain(token_ids), len(token_ids))


def compute(manager: KVCacheManager, owner: str, token_ids: list[int], start: int = 0, chunk: int = 8) -> None:
    for begin in range(start, len(token_ids), chunk):
        end = min(begin + chunk, len(token_ids))
        assert manager.grow(owner, begin, end)
        manager.commit(owner, chain(token_ids), end)


def test_a_closed_owner_leaves_its_full_blocks_findable() -> None:
    manager = manager_of(8, None)
    admitted(manager, "a", [1] * 10)
    compute(manager, "a", [1] * 10)
    manager.release("a")
    assert (manager.usage.free, manager.usage.cached, manager.usage.used) == (6, 2, 0)
    assert manager.match(chain([1] * 10), 10).num_blocks == 2
    assert manager.match(chain([1] * 8), 8).num_blocks == 1
    assert manager.match(chain([1] * 9), 9).num_blocks == 2


def test_only_computed_blocks_can_be_found() -> None:
    manager = manager_of(8, None)
    admitted(manager, "a", [1] * 20)
    assert manager.grow("a", 0, 8)
    assert manager.match(chain([1] * 20), 20).num_blocks == 0
    manager.commit("a", chain([1] * 20), 7)
    assert manager.match(chain([1] * 20), 20).num_blocks == 1


def test_the_end_of_a_chain_is_evicted_first() -> None:
    manager = manager_of(5, None)
    admitted(manager, "a", [1] * 17)
    compute(manager, "a", [1] * 17)
    manager.release("a")
    admitted(manager, "b", [2] * 12)
    compute(manager, "b", [2] * 12)
    assert manager.match(chain([1] * 17), 17).num_blocks == 2


def test_events_tell_the_parent() -> None:
    events: list[BlockEvent] = []
    manager = manager_of(8, None, 3, emit=events.append)
    admitted(manager, "a", [1] * 8)
    compute(manager, "a", [1] * 8)
    first, second = chain([1] * 8)
    assert events == [BlockStored(h, p, g) for h, p in ((first, None), (second, first)) for g in (0, 1)]


def test_in_flight_ends_with_the_commit_or_the_owner() -> None:
    manager = manager_of(8, None)
    first, second = chain([1] * 8)
    admitted(manager, "a", [1] * 8)
    manager.admit("b", manager.match([], 8), chain([1] * 8), 8)
    compute(manager, "a", [1] * 4)
    assert manager.is_being_computed(first)
    manager.release("b")
    assert not manager.is_being_computed(first)
    assert manager.is_being_computed(second)
    manager.release("a")
    assert not manager.is_being_computed(second)


def test_nothing_is_in_flight_when_nothing_can_be_shared() -> None:
    manager = manager_of(8, None, prefix_caching=False)
    admitted(manager, "a", [1] * 8)
    assert not manager.is_being_computed(chain([1] * 8)[0])


def test_a_promise_outlives_a_small_chunk() -> None:
    """A windowed owner that dropped more than it took lost its claim, and a newcomer got the blocks it needed next."""
    manager = manager_of(5, 5, chunk=12)
    admitted(manager, "a", list(range(60)))
    for start, end in ((0, 12), (12, 24), (24, 25)):
        assert manager.grow("a", start, end)
    assert manager.usage.used == 2
    assert not manager.can_admit(manager.match([], 12), 12)
    assert manager.grow("a", 25, 37)


def test_only_what_can_still_be_needed_is_promised() -> None:
    """A windowed owner of a nearly cached prompt was promised a whole chunk, and kept what it never took for life."""
    manager = manager_of(12, 5, chunk=12)
    token_ids = list(range(41))
    admitted(manager, "a", token_ids)
    compute(manager, "a", token_ids)
    manager.release("a")
    admitted(manager, "b", token_ids)
    assert manager.grow("b", 40, 41)
    assert (manager.usage.used, manager.usage.total) == (2, 12)
    for name in ("c", "d"):
        admitted(manager, name, [99, *range(19)])


def test_what_is_promised_is_not_given_to_newcomers() -> None:
    manager = manager_of(8, None)
    admitted(manager, "a", [1] * 20)
    assert manager.usage.used == 0
    assert manager.can_admit(manager.match([], 12), 12)
    assert not manager.can_admit(manager.match([], 13), 13)


def test_reviving_cached_blocks_counts() -> None:
    manager = manager_of(6, None)
    admitted(manager, "a", [1] * 17)
    compute(manager, "a", [1] * 17)
    manager.release("a")
    admitted(manager, "b", [2] * 8)
    match = manager.match(chain([1] * 17), 17)
    assert match.num_blocks == 4
    assert not manager.can_admit(match, 17)
    manager.release("b")
    assert manager.can_admit(match, 17)


def test_the_watermark_is_kept_beside_others_only() -> None:
    manager = manager_of(4, None, watermark_pages=2)
    assert manager.can_admit(manager.match([], 16), 16)
    admitted(manager, "a", [1] * 4)
    assert manager.can_admit(manager.match([], 4), 4)
    assert not manager.can_admit(manager.match([], 5), 5)


def test_a_refused_growth_allocates_nothing() -> None:
    manager = manager_of(2, None)
    table = admitted(manager, "a", [1] * 8)
    assert manager.grow("a", 0, 8)
    assert not manager.grow("a", 8, 9)
    assert table.groups == (array("i", [1, 2]),)
    manager.check()


@pytest.mark.parametrize(("num_tokens", "fits"), [(16, True), (17, False)])
def test_fits_is_about_an_owner_alone(num_tokens: int, fits: bool) -> None:
    manager = manager_of(4, None)
    admitted(manager, "a", [1] * 8)
    assert manager.fits(num_tokens) is fits


def test_opening_twice_is_a_bug() -> None:
    manager = manager_of(8, None)
    admitted(manager, "a", [1])
    with pytest.raises(AssertionError, match="already owns"):
        admitted(manager, "a", [1])


def test_cached_blocks_that_others_were_promised_are_not_leased() -> None:
    """A peer's lease on idle blocks would take them from a request that was admitted with them."""
    manager = manager_of(4, None)
    admitted(manager, "done", [1] * 8)
    compute(manager, "done", [1] * 8)
    manager.release("done")
    admitted(manager, "running", [2] * 12)
    assert manager.num_unpromised == 1
    assert manager.hold_cached("lease", chain([1] * 8)) == (0, ())
    assert manager.usage.leased == 0
    num_blocks, _ = manager.hold_cached("lease", chain([1] * 4))
    assert num_blocks == manager.usage.leased == 1
    compute(manager, "running", [2] * 12)
    manager.check()


def test_a_reservation_redeems_its_promise() -> None:
    """Counting reserved blocks as still to come would shut out others for as long as the request waits for its KV."""
    manager = manager_of(8, None)
    admitted(manager, "waits", [1] * 16)
    assert manager.num_unpromised == 4
    manager.reserve("waits", 16, 15, ())
    assert manager.num_unpromised == 4
    admitted(manager, "other", [2] * 16)
    manager.check()


def arrived(manager: KVCacheManager, tokens: list[int], *, finds: bool = True) -> tuple[BlockRange, ...]:
    """Admits a request all of whose KV comes from elsewhere, as much as is missing; returns what was to be filled."""
    hashes, last = chain(tokens) if finds else [], len(tokens) - 1
    match = manager.match(hashes, len(tokens), len(tokens))
    assert match.num_blocks == 0
    assert manager.can_admit(match, len(tokens))
    manager.admit("waits", match, chain(tokens), len(tokens))
    ranges = manager.reserve("waits", len(tokens), last, match.more)
    manager.check()
    manager.commit("waits", chain(tokens), last)
    return ranges


def test_a_group_takes_what_it_has_of_a_prefix_from_which_nobody_can_start() -> None:
    """A window of 4 tokens at the end of prompts of 24, all of whose KV came from elsewhere, leaves no beginning."""
    manager = manager_of(40, None, 4)
    for end, finds, taken in ((2, True, 0), (3, True, 4), (4, False, 0), (5, True, 4)):
        full, sliding = arrived(manager, [1] * 16 + [end] * 8, finds=finds)
        assert (full.first_index, len(full.block_ids)) == (taken, 6 - taken)
        assert (sliding.first_index, len(sliding.block_ids)) == (5, 1)
        manager.release("waits")
        manager.check()
        assert manager.usage.used == 0


def test_the_block_of_the_next_query_is_not_taken() -> None:
    """It will be written. Here all of the prompt's blocks are cached, but for the window's."""
    manager = manager_of(40, None, 4)
    for tokens in ([1] * 17, [1] * 16):
        full, _ = arrived(manager, tokens)
        manager.release("waits")
    assert (full.first_index, len(full.block_ids)) == (3, 1)


def test_what_another_request_holds_needs_no_room() -> None:
    """A prompt of 25 tokens needs 7 blocks and at most 4 of a window with a chunk; 4 of the 7 are another's."""
    manager = manager_of(16, None, 4)
    first, second = [1] * 16 + [2] * 9, [1] * 16 + [3] * 9
    arrived(manager, first)
    num_free = manager.num_unpromised
    assert num_free == 7
    assert not manager.can_admit(manager.match(chain(second), 25), 25)
    match = manager.match(chain(second), 25, 25)
    assert manager.can_admit(match, 25)
    manager.admit("second", match, chain(second), 25)
    manager.reserve("second", 25, 24, match.more)
    manager.check()
    assert num_free - manager.num_unpromised == 3 + 2


def test_matched_blocks_that_are_given_back_beside_another_user_make_no_room() -> None:
    """Regression: they counted as held, so a request was admitted for whose KV there were too few blocks."""
    first, second = [1] * 16, [1] * 16 + [2] * 9
    admitted_with = []
    for num_blocks in range(9, 20):
        manager = manager_of(num_blocks, None, 6, chunk=2)
        admitted(manager, "first", first)
        compute(manager, "first", first, chunk=2)
        match = manager.match(chain(second), 25, 25)
        assert match.num_blocks == 4
        if manager.can_admit(match, 25):
            manager.admit("second", match, chain(second), 25)
            manager.reserve("second", 25, 24, match.more)
            manager.check()
            admitted_with.append(num_blocks)
    assert 9 < admitted_with[0] < 19
    assert admitted_with == list(range(admitted_with[0], 20))


class CountedHash(bytes):
    """A block hash that counts its look-ups in dictionaries."""

    num_looked_up: ClassVar[int] = 0

    def __hash__(self) -> int:
        CountedHash.num_looked_up += 1
        return super().__hash__()


def num_lines(act: Callable[[], object]) -> int:
    """Lines of the product that `act` runs; a loop's count in every pass."""
    num, before = 0, sys.gettrace()

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal num
        num += event == "line" and frame.f_globals["__name__"].startswith("tandem.")
        return trace

    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(before)
    return num


def test_the_next_turn_of_a_known_chat_costs_what_is_new_of_it() -> None:
    """Neither loops nor look-ups follow the blocks that are known, but for one look-up of each stretch."""
    costs, num_new = [], 20
    for num_known in (10 * STRETCH_BLOCKS, 200 * STRETCH_BLOCKS):
        num_blocks = num_known + num_new
        manager = manager_of(num_blocks + 8, None, chunk=num_blocks * BLOCK_SIZE)
        hashes = [CountedHash(index.to_bytes(3)) for index in range(num_blocks)]

        def take_turn(end: int, manager: KVCacheManager = manager, hashes: list[CountedHash] = hashes) -> None:
            num_tokens = end * BLOCK_SIZE + 1
            match = manager.match(hashes[:end], num_tokens)
            assert manager.can_admit(match, num_tokens)
            manager.admit("turn", match, hashes[:end], num_tokens)
            manager.grow("turn", match.num_blocks * BLOCK_SIZE, num_tokens)
            manager.commit("turn", hashes[:end], num_tokens)
            manager.release("turn")

        take_turn(num_known)
        assert manager.match(hashes, num_blocks * BLOCK_SIZE + 1).num_blocks == num_known
        CountedHash.num_looked_up = 0
        lines = num_lines(partial(take_turn, num_blocks))
        costs.append((lines, CountedHash.num_looked_up - num_known // STRETCH_BLOCKS))
        manager.check()
    assert costs[0] == costs[1]
