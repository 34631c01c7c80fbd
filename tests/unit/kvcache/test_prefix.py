from array import array
from collections import Counter

import pytest

from tandem.core.events import BlockEvent, BlockRemoved, BlockStored
from tandem.kvcache.prefix import STRETCH_BLOCKS, HashPrefixCache, NoPrefixCache, longest_prefix
from tests.helpers.layouts import layout_of

HASHES = [bytes([i]) for i in range(10)]


def ids(*block_ids: int) -> "array[int]":
    return array("i", block_ids)


def cache_with(*groups: set[int]) -> HashPrefixCache:
    """Block `100 * group + i` holds chain index `i`."""
    cache = HashPrefixCache(len(groups), 100 * len(groups))
    for group, indices in enumerate(groups):
        for index in indices:
            cache.insert(100 * group + index + 1, HASHES[index], None, group)
    return cache


def test_every_change_emits_one_event() -> None:
    events: list[BlockEvent] = []
    cache = HashPrefixCache(2, 9, events.append)
    cache.insert(1, b"a", None, 1)
    cache.insert(2, b"a", None, 1)
    cache.insert(3, b"b", b"a", 0)
    cache.discard(1)
    assert events == [BlockStored(b"a", None, 1), BlockStored(b"b", b"a", 0), BlockRemoved(b"a", 1)]


def test_a_block_answers_to_one_hash_only() -> None:
    cache = cache_with({0})
    with pytest.raises(AssertionError, match="already cached"):
        cache.insert(1, b"other", None, 0)


def counted_chain(length: int) -> tuple[list[bytes], Counter[bytes]]:
    """A chain, and the look-ups of each of its hashes."""
    looked_up = Counter[bytes]()

    class Counted(bytes):
        def __hash__(self) -> int:
            looked_up[bytes(self)] += 1
            return super().__hash__()

    return [Counted(index.to_bytes(3)) for index in range(length)], looked_up


def cache_of_chain(hashes: list[bytes], num_held: int) -> HashPrefixCache:
    """Block `i + 1` holds the content of index `i`."""
    cache = HashPrefixCache(1, 2 * len(hashes))
    for index in range(num_held):
        cache.insert(index + 1, hashes[index], None, 0)
    cache.note_stretches(hashes, ids(*range(1, num_held + 1)), 0, 0, num_held)
    return cache


@pytest.mark.parametrize("num_held", [0, 1, 7, 10])
def test_each_block_of_a_prefix_is_looked_up_once(num_held: int) -> None:
    hashes, looked_up = counted_chain(10)
    cache = cache_of_chain(hashes, num_held)
    looked_up.clear()
    assert longest_prefix(cache, layout_of(None), hashes, 10).block_ids == (ids(*range(1, num_held + 1)),)
    assert looked_up.total() == min(num_held + 1, len(hashes))


@pytest.mark.parametrize("num_new", [0, 1, 62])
@pytest.mark.parametrize("num_held", [STRETCH_BLOCKS, 625, 6250])
def test_a_known_chain_is_looked_up_by_the_stretch(num_held: int, num_new: int) -> None:
    hashes, looked_up = counted_chain(num_held + num_new)
    cache = cache_of_chain(hashes, num_held)
    looked_up.clear()
    assert longest_prefix(cache, layout_of(None), hashes, len(hashes)).block_ids == (ids(*range(1, num_held + 1)),)
    num_stretches, num_more = divmod(num_held, STRETCH_BLOCKS)
    ends_in_new = num_more + num_new >= STRETCH_BLOCKS
    assert looked_up.total() == num_stretches + num_more + bool(num_new) + ends_in_new


@pytest.mark.parametrize("index", [STRETCH_BLOCKS, STRETCH_BLOCKS + 7, 2 * STRETCH_BLOCKS - 1])
def test_a_stretch_of_which_a_block_is_gone_is_not_used(index: int) -> None:
    hashes = [index.to_bytes(3) for index in range(3 * STRETCH_BLOCKS)]
    cache, num_blocks = cache_of_chain(hashes, len(hashes)), len(hashes)
    cache.discard(index + 1)
    cache.check()
    assert cache.leading(hashes, 0, 0, num_blocks) == ids(*range(1, index + 1))
    cache.insert(num_blocks + 1, hashes[index], None, 0)
    expected = ids(*range(1, index + 1), num_blocks + 1, *range(index + 2, num_blocks + 1))
    assert cache.leading(hashes, 0, 0, num_blocks) == expected
    own = ids(*range(1, index + 1), *range(num_blocks + 1, 2 * num_blocks - index + 1))
    cache.note_stretches(hashes, own, 0, index, num_blocks)
    cache.check()
    assert cache.leading(hashes, 0, 0, num_blocks) == expected


def test_chains_that_part_within_a_stretch_are_found_both() -> None:
    common = [index.to_bytes(3) for index in range(STRETCH_BLOCKS + 5)]
    first, second = ([*common, *(name + hash_ for hash_ in common)] for name in (b"1", b"2"))
    cache = HashPrefixCache(1, 1000)
    for start, hashes in ((1, first), (501, second)):
        for index, block_hash in enumerate(hashes):
            cache.insert(start + index, block_hash, None, 0)
        cache.note_stretches(hashes, ids(*range(start, start + len(hashes))), 0, 0, len(hashes))
    num_common, num_blocks = len(common), len(first)
    of_second = ids(*range(1, num_common + 1), *range(501 + num_common, 501 + num_blocks))
    for _ in range(2):
        assert cache.leading(second, 0, 0, num_blocks) == of_second
        cache.check()
        if cache.holds(num_common + 1):
            assert cache.leading(first, 0, 0, num_blocks) == ids(*range(1, num_blocks + 1))
            cache.discard(num_common + 1)
    assert cache.leading(first, 0, 0, num_blocks) == ids(*range(1, num_common + 1))
    cache.discard(num_common)
    assert cache.leading(second, 0, 0, num_blocks) == ids(*range(1, num_common))


def test_the_beginning_of_a_chain_ends_at_the_first_block_that_is_missing() -> None:
    cache = cache_with({0, 1, 3}, {0})
    assert cache.leading(HASHES, 0, 0, 10) == ids(1, 2)
    assert cache.leading(HASHES, 0, 0, 1) == ids(1)
    assert cache.leading(HASHES, 0, 1, 10) == ids(2)
    assert cache.leading(HASHES, 1, 0, 1) == ids(101)
    assert cache.leading(HASHES, 0, 2, 10) == NoPrefixCache(9).leading(HASHES, 0, 0, 10) == ids()


@pytest.mark.parametrize(
    ("windows", "held", "max_blocks", "expected"),
    [
        ((None,), [{0, 1, 2}], 10, 3),
        ((None,), [{0, 1, 2}], 2, 2),
        ((None,), [{0, 2, 3}], 10, 1),
        ((None,), [{1, 2}], 10, 0),
        ((5,), [{6}], 10, 7),  # the query at 28 sees 24..28: block 6
        ((6,), [{6}], 10, 0),  # it sees 23 too, in block 5
        ((6,), [{5, 6}], 10, 7),
        ((6,), [{0, 5, 6, 9}], 10, 7),
        ((6,), [{0, 5, 6, 9}], 6, 1),  # block 0 is all there is before block 1
        ((None, 5), [{0, 1, 2, 3}, {2}], 10, 3),
        ((None, 5), [{0, 1}, {2}], 10, 0),
        ((None, 5, 9), [set(range(9)), {4, 7}, {3, 4, 6}], 10, 5),
        ((None, 5, 9), [set(range(9)), {2, 7}, {1, 2, 3, 4, 6}], 10, 3),  # 8, then 5, then 3: nobody is asked only once
        ((5, None), [{8}, set(range(9))], 10, 9),
    ],
)
def test_the_longest_prefix_all_groups_serve(
    windows: tuple[int | None, ...], held: list[set[int]], max_blocks: int, expected: int
) -> None:
    match = longest_prefix(cache_with(*held), layout_of(*windows), HASHES, max_blocks)
    assert match.num_blocks == expected
    assert all(len(ids) == expected for ids in match.block_ids)
    for group, (window, ids) in enumerate(zip(windows, match.block_ids, strict=True)):
        first = 0 if window is None else max(0, 4 * expected - window + 1) // 4
        assert list(ids) == [0] * first + [100 * group + i + 1 for i in range(first, expected)]
        assert match.num_dropped[group] == first


def test_without_a_cache_nothing_matches() -> None:
    assert longest_prefix(NoPrefixCache(9), layout_of(None, 9), HASHES, 10).block_ids == (ids(), ids())
