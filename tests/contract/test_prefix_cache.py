"""Contract of every `PrefixCache` with the block pool."""

from collections.abc import Callable

import pytest

from tandem.kvcache.prefix import HashPrefixCache, NoPrefixCache, PrefixCache

CACHES: dict[str, Callable[[], PrefixCache]] = {"hash": lambda: HashPrefixCache(2, 9), "none": lambda: NoPrefixCache(9)}


@pytest.fixture(params=CACHES.values(), ids=list(CACHES))
def cache(request: pytest.FixtureRequest) -> PrefixCache:
    cache: PrefixCache = request.param()
    return cache


def test_nothing_is_found_before_it_is_inserted(cache: PrefixCache) -> None:
    assert cache.lookup(b"a", 0) is None
    assert not cache.holds(1)


def test_an_accepted_block_is_held_and_a_refused_one_is_not(cache: PrefixCache) -> None:
    accepted = cache.insert(1, b"a", None, 0)
    assert cache.holds(1) == accepted
    assert cache.lookup(b"a", 0) == (1 if accepted else None)


def test_a_second_block_of_the_same_content_is_refused(cache: PrefixCache) -> None:
    cache.insert(1, b"a", None, 0)
    found = cache.lookup(b"a", 0)
    assert not cache.insert(2, b"a", None, 0)
    assert not cache.holds(2)
    assert cache.lookup(b"a", 0) == found


def test_groups_do_not_see_each_other(cache: PrefixCache) -> None:
    cache.insert(1, b"a", None, 0)
    assert cache.lookup(b"a", 1) is None
    accepted = cache.insert(2, b"a", None, 1)
    assert cache.lookup(b"a", 1) == (2 if accepted else None)


def test_a_discarded_block_can_serve_another_content(cache: PrefixCache) -> None:
    if cache.insert(1, b"a", None, 0):
        cache.discard(1)
    assert cache.lookup(b"a", 0) is None
    assert not cache.holds(1)
    accepted = cache.insert(1, b"b", b"a", 1)
    assert cache.lookup(b"b", 1) == (1 if accepted else None)


def test_groups_of_blocks_are_told_by_number(cache: PrefixCache) -> None:
    accepted = [cache.insert(block_id, b"a", None, group) for block_id, group in ((3, 0), (4, 1))]
    assert list(cache.groups) == [0, 0, 0, accepted[0], 2 * accepted[1], 0, 0, 0, 0, 0]
    cache.check()
    for block_id, is_held in zip((3, 4), accepted, strict=True):
        if is_held:
            cache.discard(block_id)
    assert not any(cache.groups)
    cache.check()


def test_discarding_what_is_not_held_is_a_bug(cache: PrefixCache) -> None:
    with pytest.raises((AssertionError, KeyError)):
        cache.discard(1)
