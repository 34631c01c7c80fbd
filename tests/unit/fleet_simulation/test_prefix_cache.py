"""The simulated prefix cache: longest beginning, bounded, last blocks of a prompt go first."""

from tandem.fleet_simulation.prefix_cache import SimulatedPrefixCache


def test_only_a_beginning_counts() -> None:
    cache = SimulatedPrefixCache(10)
    cache.keep((1, 2, 3))
    assert cache.leading((1, 2, 9, 3)) == 2
    assert cache.leading((2, 3)) == 2
    assert cache.leading((9, 1)) == 0


def test_it_is_bounded_and_gives_up_ends_first() -> None:
    cache = SimulatedPrefixCache(3)
    cache.keep((1, 2, 3, 4))
    assert len(cache) == 3
    assert cache.leading((1, 2, 3, 4)) == 3


def test_what_was_used_last_stays() -> None:
    cache = SimulatedPrefixCache(4)
    cache.keep((1, 2))
    cache.keep((5, 6))
    cache.keep((1, 2))
    cache.keep((7, 8))
    assert cache.leading((1, 2)) == 2
    assert cache.leading((5, 6)) == 0
