import random

import numpy as np
import pytest

from tandem.routing.candidates import WorkerSnapshot
from tandem.routing.fleet import snapshot_of
from tandem.routing.snapshot import Links, LinkState
from tandem.routing.worker_table import WorkerTable
from tests.unit.routing.builders import LINK, SLOW, snapshot, worker

GOOD = LinkState(100e9, 0.1)


def ids_of(table: WorkerTable) -> list[str]:
    return [snapshot.worker_id for snapshot in table.snapshots]


def test_columns_say_what_the_snapshots_say_whatever_came_and_went() -> None:
    source, table, known = random.Random(3), WorkerTable(Links(LINK)), dict[str, WorkerSnapshot]()
    for _ in range(500):
        name = f"w{source.randrange(60)}"
        if source.random() < 0.4:
            table.drop(name)
            known.pop(name, None)
            continue
        state = worker(name, num_running=source.randrange(50), num_free_blocks=source.randrange(9000))
        known[name] = snapshot_of(state, SLOW, turn=source.randrange(-(1 << 52), 1 << 52))
        table.put(known[name])
    assert sorted(ids_of(table)) == sorted(known)
    assert len(table) == len(table.columns.turn) == len(known)
    for row, name in enumerate(ids_of(table)):
        assert table.snapshots[row] is known[name]
        assert table.row_of(name) == row
        assert table.columns.num_running[row] == known[name].num_running
        assert table.columns.num_free_blocks[row] == known[name].num_free_blocks
        assert table.columns.turn[row] == known[name].turn
        assert table.columns.decode_ms_per_request[row] == SLOW.decode.ms_per_request


def test_a_better_link_shows_once_it_is_read_again_and_for_who_comes_later() -> None:
    links = Links(LINK)
    table = WorkerTable.of([snapshot(worker("a")), snapshot(worker("b"))], links)
    links.update("b", "a", GOOD)
    links.update("b", "c", GOOD)
    assert set(links.take_improved()) == {"a", "c"}
    assert not links.take_improved()
    table.refresh_link("a")
    table.refresh_link("unknown")
    table.put(snapshot(worker("c")))
    assert table.columns.best_bytes_per_s.tolist() == [100e9, LINK.bytes_per_s, 100e9]
    assert table.columns.best_latency_ms.tolist() == [0.1, LINK.latency_ms, 0.1]


def test_values_are_scattered_to_those_who_are_there() -> None:
    table = WorkerTable.of([snapshot(worker(name)) for name in "abc"], Links(LINK))
    assert table.scattered({"c": 3, "elsewhere": 9, "a": 1}).tolist() == [1.0, 0.0, 3.0]
    assert table.scattered({}, default=7.5).tolist() == [7.5, 7.5, 7.5]
    assert WorkerTable(Links(LINK)).scattered({"a": 1}).tolist() == []


@pytest.mark.parametrize("num_workers", [1, 16, 17, 100])
def test_it_grows(num_workers: int) -> None:
    table = WorkerTable.of([snapshot(worker(f"w{i}", num_running=i)) for i in range(num_workers)], Links(LINK))
    assert np.array_equal(table.columns.num_running, np.arange(num_workers))
