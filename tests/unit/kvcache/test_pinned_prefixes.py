"""Single promises about pinned prefixes; random histories are in `test_pins_stateful`."""

from tandem.core.events import BlockEvent, BlockRemoved, BlockStored
from tandem.kvcache.block_table import BlockRange
from tandem.kvcache.manager import KVCacheManager
from tandem.kvcache.tiers import HostMove
from tests.helpers.layouts import layout_of
from tests.unit.kvcache.test_manager import admitted, chain


def manager_of(num_blocks: int, *windows: int | None, share: float = 0.5) -> KVCacheManager:
    return KVCacheManager(layout_of(*windows), num_blocks, max_chunk_tokens=8, pin_share=share)


def serve(manager: KVCacheManager, token_ids: list[int], num_pinned_tokens: int = 0, ttl_s: float = 60.0) -> int:
    """Computes a prompt and pins its beginning on the way, as the scheduler does; returns the blocks granted."""
    admitted(manager, "r", token_ids)
    granted = 0
    for end in range(8, len(token_ids) + 8, 8):
        before, end = end - 8, min(end, len(token_ids))
        assert manager.grow("r", before, end)
        manager.commit("r", chain(token_ids), end)
        if before < num_pinned_tokens <= end:
            granted = manager.pinned.pin(chain(token_ids)[: num_pinned_tokens // 4], ttl_s)
    manager.release("r")
    manager.check()
    return granted


def cached(manager: KVCacheManager, token_ids: list[int]) -> int:
    return manager.match(chain(token_ids), len(token_ids) + 1).num_blocks


def evict(manager: KVCacheManager) -> None:
    manager.borrow("all", 1000)
    manager.drop("all")
    manager.check()


def test_a_pinned_block_is_not_room_until_its_time_is_over() -> None:
    manager = manager_of(8, None)
    assert serve(manager, [1] * 16, 12) == 3
    assert (manager.usage.pinned, manager.usage.cached, manager.num_unpromised) == (3, 1, 5)
    evict(manager)
    assert cached(manager, [1] * 16) == 3
    manager.pinned.tell_time(59.9)
    evict(manager)
    assert cached(manager, [1] * 16) == 3
    manager.pinned.tell_time(60.0)
    assert (manager.usage.pinned, manager.num_unpromised) == (0, 8)
    assert cached(manager, [1] * 16) == 3, "it is gone only when the room is needed"
    evict(manager)
    assert cached(manager, [1] * 16) == 0


def test_what_is_over_is_evicted_first_and_from_its_end() -> None:
    manager = manager_of(8, None)
    serve(manager, [1] * 12, 12)
    serve(manager, [2] * 12)
    manager.pinned.tell_time(60.0)
    manager.borrow("taken", 3)
    assert (cached(manager, [1] * 12), cached(manager, [2] * 12)) == (2, 3)


def test_a_windowed_group_keeps_what_the_next_request_sees() -> None:
    manager = manager_of(24, None, 6)
    assert serve(manager, [1] * 40, 16) == 4
    evict(manager)
    assert cached(manager, [1] * 16) == 4
    assert cached(manager, [1] * 40) == 4
    assert manager.usage.pinned == 4 + 2, "a window of six tokens before token 16 lies in two blocks"


def test_a_prefix_whose_window_is_gone_is_granted_as_far_as_it_can_be_served() -> None:
    manager = manager_of(24, None, 6)
    serve(manager, [1] * 40)
    manager.borrow("taken", 10)
    granted = manager.pinned.pin(chain([1] * 16), 60.0)
    assert granted < 4 <= cached(manager, [1] * 40)
    evict(manager)
    assert cached(manager, [1] * 16) == granted


def test_one_that_is_alone_takes_pinned_blocks_and_only_as_many_as_it_needs() -> None:
    manager = manager_of(8, None, share=1.0)
    serve(manager, [1] * 24, 24)
    match = manager.match([], 20)
    assert not manager.can_admit(match, 20)
    assert manager.make_room(match, 20)
    assert manager.usage.pinned == 3
    assert cached(manager, [1] * 24) == 6, "nothing is evicted before it is needed"


def test_one_beside_others_waits_for_them() -> None:
    manager = manager_of(8, None, share=0.5)
    serve(manager, [1] * 16, 16)
    admitted(manager, "other", [2] * 8)
    match = manager.match([], 12)
    assert not manager.make_room(match, 12)
    assert manager.usage.pinned == 4
    manager.release("other")
    assert manager.make_room(match, 12)
    assert manager.usage.pinned == 4


def test_a_lease_is_waited_for_too() -> None:
    manager = manager_of(8, None, share=0.5)
    serve(manager, [1] * 16, 16)
    manager.borrow("lease", 3)
    match = manager.match([], 12)
    assert not manager.make_room(match, 12)
    manager.drop("lease")
    assert manager.make_room(match, 12)
    assert manager.usage.pinned == 4


def with_host(num_slots: int, share: float = 0.5) -> tuple[KVCacheManager, list[HostMove], list[BlockEvent]]:
    events: list[BlockEvent] = []
    moves: list[HostMove] = []
    manager = KVCacheManager(layout_of(None), 8, max_chunk_tokens=8, pin_share=share, emit=events.append)
    manager.pinned.blocks.attach_host(num_slots, moves.append)
    return manager, moves, events


def test_the_oldest_move_to_the_host_tier_when_the_share_is_full() -> None:
    manager, moves, events = with_host(4)
    assert serve(manager, [1] * 12, 12) == 3
    assert not moves
    assert serve(manager, [2] * 12, 12) == 3
    (move,) = moves
    assert len(move.pairs) == 2
    assert (manager.usage.transferring, manager.usage.pinned) == (2, 4), "what is being copied must not be reused"
    manager.pinned.blocks.end_move(move.move_id, is_copied=True)
    manager.check()
    assert manager.pinned.blocks.usage.num_host == 2
    evict(manager)
    assert cached(manager, [1] * 12) == 1
    assert manager.pinned.num_restorable(chain([1] * 12)) == 3
    assert not any(isinstance(event, BlockRemoved) for event in events), "what the host tier has is not lost"
    manager.pinned.tell_time(60.0)
    assert sum(isinstance(event, BlockRemoved) for event in events) == 2
    assert len([event for event in events if isinstance(event, BlockStored)]) == 6


def test_a_full_host_tier_grants_in_part() -> None:
    manager, moves, _ = with_host(1)
    assert serve(manager, [1] * 12, 12) == 3
    assert serve(manager, [2] * 12, 12) == 2
    assert len(moves) == 1
    assert serve(manager, [3] * 4, 4) == 0


def test_what_is_used_while_it_moves_stays() -> None:
    manager, moves, _ = with_host(8)
    serve(manager, [1] * 12, 12)
    serve(manager, [2] * 8, 8)
    (move,) = moves
    assert manager.pinned.pin(chain([1] * 12), 60.0) == 3
    manager.pinned.blocks.end_move(move.move_id, is_copied=True)
    manager.check()
    evict(manager)
    assert cached(manager, [1] * 12) == 3


def test_a_host_tier_that_fails_is_given_up_and_nothing_is_lost() -> None:
    manager, moves, _ = with_host(8)
    serve(manager, [1] * 12, 12)
    serve(manager, [2] * 8, 8)
    manager.pinned.blocks.end_move(moves[0].move_id, is_copied=False)
    manager.check()
    evict(manager)
    assert (cached(manager, [1] * 12), cached(manager, [2] * 8)) == (3, 2)
    assert serve(manager, [3] * 4, 4) == 0, "more was promised than can be held"
    assert len(moves) == 1


def test_what_was_promised_to_a_running_request_is_not_pinned() -> None:
    manager = manager_of(8, None)
    serve(manager, [1] * 16)
    admitted(manager, "other", [2] * 24)
    assert manager.num_unpromised == 2
    assert manager.pinned.pin(chain([1] * 16), 60.0) == 2
    assert manager.grow("other", 0, 8)
    assert manager.grow("other", 8, 24)
    manager.check()


def test_a_slot_that_is_read_outlives_its_promise() -> None:
    manager, moves, _ = with_host(1)
    serve(manager, [1] * 12, 12)
    serve(manager, [2] * 8, 8)
    manager.pinned.blocks.end_move(moves[0].move_id, is_copied=True)
    evict(manager)
    (lost,) = [index for index, key in enumerate(chain([1] * 12)) if manager.pinned.blocks.slots_of((0, key))]
    reads = manager.pinned.begin_restore(chain([1] * 12), (BlockRange(lost, (8,)),))
    manager.pinned.tell_time(60.0)
    serve(manager, [3] * 12, 12)
    serve(manager, [4] * 8, 8)
    assert len(moves) == 1, "the slot was given to another content while it was read"
    manager.pinned.blocks.end_reads(reads, is_restored=True)
    assert len(moves) <= 2
    manager.check()
