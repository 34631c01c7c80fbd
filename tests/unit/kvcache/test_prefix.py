from collections.abc import Iterable

import pytest

from tandem.core.events import BlockEvent, BlockRemoved, BlockStored
from tandem.kvcache.prefix import HashPrefixCache, NoPrefixCache, longest_prefix
from tests.helpers.layouts import layout_of

HASHES = [bytes([i]) for i in range(10)]


def cache_with(*groups: set[int]) -> HashPrefixCache:
    """Block `100 * group + i` holds chain index `i`."""
    cache = HashPrefixCache(len(groups))
    for group, indices in enumerate(groups):
        for index in indices:
            cache.insert(100 * group + index + 1, HASHES[index], None, group)
    return cache


def test_every_change_emits_one_event() -> None:
    events: list[BlockEvent] = []
    cache = HashPrefixCache(2, events.append)
    cache.insert(1, b"a", None, 1)
    cache.insert(2, b"a", None, 1)
    cache.insert(3, b"b", b"a", 0)
    cache.discard(1)
    assert events == [BlockStored(b"a", None, 1), BlockStored(b"b", b"a", 0), BlockRemoved(b"a", 1)]


def test_a_block_answers_to_one_hash_only() -> None:
    cache = cache_with({0})
    with pytest.raises(AssertionError, match="already cached"):
        cache.insert(1, b"other", None, 0)


class _Counting(HashPrefixCache):
    """Counts the blocks that a search looks at."""

    num_looked_up = 0

    def lookup(self, block_hash: bytes, group: int) -> int | None:
        self.num_looked_up += 1
        return super().lookup(block_hash, group)

    def leading(self, hashes: Iterable[bytes], group: int) -> list[int]:
        return super().leading(map(self._counted, hashes), group)

    def _counted(self, block_hash: bytes) -> bytes:
        self.num_looked_up += 1
        return block_hash


@pytest.mark.parametrize("num_held", [0, 1, 7, 10])
def test_each_block_of_a_prefix_is_looked_up_once(num_held: int) -> None:
    cache = _Counting(1)
    for index in range(num_held):
        cache.insert(index + 1, HASHES[index], None, 0)
    assert longest_prefix(cache, layout_of(None), HASHES, 10).block_ids == (tuple(range(1, num_held + 1)),)
    assert cache.num_looked_up == min(num_held + 1, len(HASHES))


def test_the_beginning_of_a_chain_ends_at_the_first_block_that_is_missing() -> None:
    cache = cache_with({0, 1, 3}, {0})
    assert cache.leading(HASHES, 0) == [1, 2]
    assert cache.leading(HASHES[1:], 0) == [2]
    assert cache.leading(HASHES[:1], 1) == [101]
    assert cache.leading(HASHES[2:], 0) == NoPrefixCache().leading(HASHES, 0) == []


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
    assert longest_prefix(NoPrefixCache(), layout_of(None, 9), HASHES, 10).block_ids == ((), ())
