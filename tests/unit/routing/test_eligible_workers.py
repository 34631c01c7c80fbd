import numpy as np

from tandem.routing.candidates import num_cached_blocks
from tandem.routing.eligible_workers import EligibleWorkers
from tandem.routing.fleet import snapshot_of
from tandem.routing.snapshot import Links
from tandem.routing.worker_table import WorkerTable
from tests.unit.routing.builders import FAST, LINK, request, worker


def eligible_of(*names: str, turns: tuple[int, ...] = ()) -> EligibleWorkers:
    turns = turns or tuple(range(len(names)))
    return EligibleWorkers(
        WorkerTable.of(
            [snapshot_of(worker(name), FAST, turn=turn) for name, turn in zip(names, turns, strict=True)], Links(LINK)
        )
    )


def ids_of(eligible: EligibleWorkers) -> list[str]:
    return [snapshot.worker_id for snapshot in eligible]


def test_the_barred_are_not_seen() -> None:
    eligible = eligible_of("a", "b", "c", "d")
    some = eligible.without(np.array([True, False, False, False])).without_ids(["c", "unknown"])
    assert ids_of(eligible) == ["a", "b", "c", "d"]
    assert ids_of(some) == ["b", "d"]
    assert (len(some), some[0].worker_id, some[-1].worker_id) == (2, "b", "d")
    assert some.forbid(np.zeros(4)).tolist() == [np.inf, 0.0, np.inf, 0.0]
    assert some.forbid(np.zeros((2, 4)))[1].tolist() == [np.inf, 0.0, np.inf, 0.0]
    assert not some.without_ids(["b", "d"])


def test_a_list_becomes_a_lineup_and_a_lineup_stays_one() -> None:
    eligible = eligible_of("a", "b")
    assert EligibleWorkers.of(eligible, Links(LINK)) is eligible
    assert ids_of(EligibleWorkers.of(list(eligible), Links(LINK))) == ["a", "b"]


def test_among_equals_the_one_chosen_longest_ago_is_first() -> None:
    eligible = eligible_of("a", "b", "c", "d", turns=(4, 3, -(1 << 51), -(1 << 51) - 1))
    assert eligible.first(np.array([1.0, 1.0, 1.0, 2.0])) == 2
    assert eligible.first(np.array([1.0, 1.0, 1.0, 1.0])) == 3
    assert eligible.first(np.array([1.0, 0.5, 1.0, 1.0])) == 1


def test_cached_blocks_are_those_of_the_snapshots() -> None:
    eligible = eligible_of("a", "b", "c", "d")
    for num_tokens in (1, 16, 17, 2000):
        shape = request(num_tokens, {"b": 10, "d": 1000, "elsewhere": 5})
        assert eligible.cached_blocks(shape).tolist() == [num_cached_blocks(shape, s.worker) for s in eligible]
    assert eligible.cached_blocks(request(2000)).tolist() == [0.0] * 4
