"""Queue of blocks against a list."""

import random

import numpy as np
import pytest

from tandem.kvcache.eviction_queue import BlockIds, EvictionQueue


def column(*block_ids: int) -> BlockIds:
    return np.array(block_ids, dtype=np.int32)


def test_blocks_leave_in_order_wherever_they_came_from() -> None:
    queue = EvictionQueue(9)
    queue.extend([5])
    queue.extend_column(column(3, 7, 1))
    queue.prepend(9)
    queue.remove([7])
    assert (list(queue), len(queue), 7 in queue, 3 in queue) == ([9, 5, 3, 1], 4, False, True)
    queue.extend([7])
    queue.remove_column(column(5, 1))
    assert queue.are_in(column(9, 5, 7)).tolist() == [True, False, True]
    queue.check()
    assert [queue.pop() for _ in range(3)] == [9, 3, 7]
    assert len(queue) == 0
    with pytest.raises(AssertionError, match="nothing can be evicted"):
        queue.pop()
    with pytest.raises(AssertionError, match="block 7 is not in the queue"):
        queue.remove([7])


@pytest.mark.parametrize("seed", range(20))
def test_any_moves_keep_the_order_of_a_list(seed: int) -> None:
    """Far more moves than the buffer has entries."""
    rng, num_blocks = random.Random(seed), 50
    queue, expected = EvictionQueue(num_blocks), list[int]()
    for _ in range(600):
        others = [block_id for block_id in range(1, num_blocks + 1) if block_id not in expected]
        move, count = rng.randrange(5), rng.randrange(1, 20)
        chosen = rng.sample(others, min(count, len(others)))
        held = rng.sample(expected, min(count, len(expected)))
        if move == 0:
            queue.extend_column(column(*chosen))
            expected += chosen
        elif move == 1:
            queue.extend(chosen[:3])
            expected += chosen[:3]
        elif move == 2:
            for block_id in chosen:
                queue.prepend(block_id)
            expected[:0] = reversed(chosen)
        elif move == 3:
            queue.remove_column(column(*held))
            expected = [block_id for block_id in expected if block_id not in held]
        elif expected:
            assert queue.first == expected[0]
            assert queue.pop() == expected.pop(0)
        queue.check()
        assert list(queue) == expected


def test_many_entries_that_count_no_longer_are_passed_at_once() -> None:
    """A long conversation's blocks were taken again, before shorter ones."""
    queue = EvictionQueue(20_000)
    queue.extend_column(np.arange(1, 20_001, dtype=np.int32))
    queue.remove_column(np.arange(1, 20_000, dtype=np.int32))
    assert queue.pop() == 20_000
    queue.check()


def test_check_notices_a_block_without_an_entry() -> None:
    queue = EvictionQueue(9)
    queue.extend_column(column(1, 2))
    queue._places[2] = queue._places[1]
    with pytest.raises(AssertionError, match="another block has an entry"):
        queue.check()
