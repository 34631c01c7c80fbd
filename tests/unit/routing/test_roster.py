import random

import numpy as np
import pytest

from tandem.routing.fleet import standing_of
from tandem.routing.roster import Roster
from tandem.routing.snapshot import Links, LinkState
from tandem.routing.standing import WorkerSnapshot
from tests.unit.routing.builders import LINK, SLOW, standing, worker

GOOD = LinkState(100e9, 0.1)


def ids_of(roster: Roster) -> list[str]:
    return [standing.worker_id for standing in roster.standings]


def test_columns_say_what_the_standings_say_whatever_came_and_went() -> None:
    source, roster, known = random.Random(3), Roster(Links(LINK)), dict[str, WorkerSnapshot]()
    for _ in range(500):
        name = f"w{source.randrange(60)}"
        if source.random() < 0.4:
            roster.drop(name)
            known.pop(name, None)
            continue
        state = worker(name, num_running=source.randrange(50), num_free_blocks=source.randrange(9000))
        known[name] = standing_of(state, SLOW, turn=source.randrange(-(1 << 52), 1 << 52))
        roster.put(known[name])
    assert sorted(ids_of(roster)) == sorted(known)
    assert len(roster) == len(roster.columns.turn) == len(known)
    for row, name in enumerate(ids_of(roster)):
        assert roster.standings[row] is known[name]
        assert roster.row_of(name) == row
        assert roster.columns.num_running[row] == known[name].num_running
        assert roster.columns.num_free_blocks[row] == known[name].num_free_blocks
        assert roster.columns.turn[row] == known[name].turn
        assert roster.columns.decode_ms_per_request[row] == SLOW.decode.ms_per_request


def test_a_better_link_shows_once_it_is_read_again_and_for_who_comes_later() -> None:
    links = Links(LINK)
    roster = Roster.of([standing(worker("a")), standing(worker("b"))], links)
    links.update("b", "a", GOOD)
    links.update("b", "c", GOOD)
    assert set(links.take_improved()) == {"a", "c"}
    assert not links.take_improved()
    roster.refresh_link("a")
    roster.refresh_link("unknown")
    roster.put(standing(worker("c")))
    assert roster.columns.best_bytes_per_s.tolist() == [100e9, LINK.bytes_per_s, 100e9]
    assert roster.columns.best_latency_ms.tolist() == [0.1, LINK.latency_ms, 0.1]


def test_values_are_scattered_to_those_who_are_there() -> None:
    roster = Roster.of([standing(worker(name)) for name in "abc"], Links(LINK))
    assert roster.scattered({"c": 3, "elsewhere": 9, "a": 1}).tolist() == [1.0, 0.0, 3.0]
    assert roster.scattered({}, default=7.5).tolist() == [7.5, 7.5, 7.5]
    assert Roster(Links(LINK)).scattered({"a": 1}).tolist() == []


@pytest.mark.parametrize("num_workers", [1, 16, 17, 100])
def test_it_grows(num_workers: int) -> None:
    roster = Roster.of([standing(worker(f"w{i}", num_running=i)) for i in range(num_workers)], Links(LINK))
    assert np.array_equal(roster.columns.num_running, np.arange(num_workers))
