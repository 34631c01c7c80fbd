import numpy as np

from tandem.routing.fleet import standing_of
from tandem.routing.lineup import Lineup
from tandem.routing.roster import Roster
from tandem.routing.snapshot import Links
from tandem.routing.standing import num_cached_blocks
from tests.unit.routing.builders import FAST, LINK, request, worker


def lineup_of(*names: str, turns: tuple[int, ...] = ()) -> Lineup:
    turns = turns or tuple(range(len(names)))
    return Lineup(
        Roster.of(
            [standing_of(worker(name), FAST, turn=turn) for name, turn in zip(names, turns, strict=True)], Links(LINK)
        )
    )


def ids_of(lineup: Lineup) -> list[str]:
    return [standing.worker_id for standing in lineup]


def test_the_barred_are_not_seen() -> None:
    lineup = lineup_of("a", "b", "c", "d")
    some = lineup.without(np.array([True, False, False, False])).without_ids(["c", "unknown"])
    assert ids_of(lineup) == ["a", "b", "c", "d"]
    assert ids_of(some) == ["b", "d"]
    assert (len(some), some[0].worker_id, some[-1].worker_id) == (2, "b", "d")
    assert some.forbid(np.zeros(4)).tolist() == [np.inf, 0.0, np.inf, 0.0]
    assert some.forbid(np.zeros((2, 4)))[1].tolist() == [np.inf, 0.0, np.inf, 0.0]
    assert not some.without_ids(["b", "d"])


def test_a_list_becomes_a_lineup_and_a_lineup_stays_one() -> None:
    lineup = lineup_of("a", "b")
    assert Lineup.of(lineup, Links(LINK)) is lineup
    assert ids_of(Lineup.of(list(lineup), Links(LINK))) == ["a", "b"]


def test_among_equals_the_one_chosen_longest_ago_is_first() -> None:
    lineup = lineup_of("a", "b", "c", "d", turns=(4, 3, -(1 << 51), -(1 << 51) - 1))
    assert lineup.first(np.array([1.0, 1.0, 1.0, 2.0])) == 2
    assert lineup.first(np.array([1.0, 1.0, 1.0, 1.0])) == 3
    assert lineup.first(np.array([1.0, 0.5, 1.0, 1.0])) == 1


def test_cached_blocks_are_those_of_the_standings() -> None:
    lineup = lineup_of("a", "b", "c", "d")
    for num_tokens in (1, 16, 17, 2000):
        shape = request(num_tokens, {"b": 10, "d": 1000, "elsewhere": 5})
        assert lineup.cached_blocks(shape).tolist() == [num_cached_blocks(shape, s.worker) for s in lineup]
    assert lineup.cached_blocks(request(2000)).tolist() == [0.0] * 4
