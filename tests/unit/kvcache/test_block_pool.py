from array import array
from collections import Counter

import pytest

from tandem.kvcache.block_pool import BlockPool
from tandem.kvcache.prefix import HashPrefixCache


def pool_of(num_blocks: int, *cached: int) -> tuple[BlockPool, HashPrefixCache]:
    """A pool whose blocks `cached` hold content and were let go in this order."""
    cache = HashPrefixCache(1, num_blocks)
    pool = BlockPool(num_blocks, cache)
    blocks = pool.allocate(num_blocks)
    for block_id in cached:
        cache.insert(block_id, bytes([block_id]), None, 0)
    pool.release(block_id for block_id in blocks if block_id not in cached)
    pool.release(cached)
    return pool, cache


def test_hands_out_the_lowest_free_ids_and_never_the_null_block() -> None:
    pool, _ = pool_of(5)
    assert pool.allocate(3) == [1, 2, 3]
    pool.release([2, 1])
    assert pool.allocate(3) == [1, 2, 4]
    assert (pool.num_free, pool.num_used, pool.num_available) == (1, 4, 1)


def test_evicts_only_without_free_blocks_least_recently_used_first() -> None:
    pool, cache = pool_of(5, 4, 2, 3)
    assert pool.num_cached == 3
    assert pool.allocate(3) == [1, 5, 4]
    assert not cache.holds(4)
    assert cache.lookup(bytes([2]), 0) == 2
    pool.acquire([2])
    pool.release([2])
    assert pool.allocate(2) == [3, 2]
    pool.check(Counter([1, 2, 3, 4, 5]))


def test_a_shared_block_stays_until_its_last_reference_goes() -> None:
    pool, _ = pool_of(2, 1)
    pool.acquire([1, 0, 0])
    pool.acquire([1])
    assert pool.num_idle([0, 1]) == 0
    pool.release([1])
    assert (pool.num_used, pool.num_cached) == (1, 0)
    pool.check(Counter([1]))
    pool.release([0, 1])
    assert (pool.num_used, pool.num_cached) == (0, 1)
    assert pool.num_idle([0, 1]) == 1


def test_releasing_too_often_and_asking_too_much_are_bugs() -> None:
    pool, _ = pool_of(2)
    with pytest.raises(AssertionError, match="released too often"):
        pool.release([1])
    with pytest.raises(AssertionError, match="3 blocks asked of 2"):
        pool.allocate(3)


def test_check_notices_a_reference_that_no_owner_holds() -> None:
    pool, _ = pool_of(2)
    pool.allocate(1)
    with pytest.raises(AssertionError, match="block 1 counts 1 references; its owners hold 0"):
        pool.check(Counter())


def test_a_block_of_several_pages_is_one_in_all_but_numbers() -> None:
    """Its pages are any that are free; it is cached, found and evicted as a whole."""
    pool, cache = pool_of(9, 3)
    first, single, second = *pool.allocate(1, 3), *pool.allocate(1), *pool.allocate(1, 3)
    assert [pool.pages_of(block) for block in (first, single, second)] == [(1, 2, 4), (5,), (6, 7, 8)]
    assert (pool.num_used, pool.num_free, pool.num_cached) == (7, 1, 1)
    cache.insert(first, b"state", None, 0)
    pool.release([first, single])
    assert (pool.num_used, pool.num_free, pool.num_cached, pool.num_idle([first, 3])) == (3, 2, 4, 4)
    pool.acquire([first])
    pool.pin(first)
    pool.release([first])
    assert (pool.num_pinned, pool.num_available) == (3, 3)
    pool.unpin(first)
    pool.check(Counter([second]))
    assert pool.allocate(4) == [5, 9, 1, 2]
    assert not cache.holds(first)
    assert cache.holds(3)
    pool.check(Counter([second, 1, 2, 5, 9]))


def test_pages_of_a_freed_block_serve_the_next_of_as_many_and_any_other_when_needed() -> None:
    pool, _ = pool_of(6)
    (block,) = pool.allocate(1, 4)
    pool.release([block])
    assert pool.num_free == 6
    assert pool.allocate(1) == [5]
    (again,) = pool.allocate(1, 4)
    assert pool.pages_of(again) == (1, 2, 3, 4)
    pool.release([again])
    assert sorted(pool.allocate(5)) == [1, 2, 3, 4, 6]
    pool.check(Counter(range(1, 7)))


def test_a_block_that_is_named_twice_among_many_gets_two_references() -> None:
    """Idle, and in use; as columns and one by one."""
    cached = range(1, 61)
    pool, _ = pool_of(70, *cached)
    given = array("i", [*cached, 7, 60])
    pool.acquire(given)
    pool.check(Counter(given))
    pool.acquire(given)
    pool.check(Counter([*given, *given]))
    for _ in range(2):
        pool.release(given[::-1])
    pool.check(Counter())
    assert pool.num_cached == 60
