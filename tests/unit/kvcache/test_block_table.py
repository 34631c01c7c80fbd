from array import array

from tandem.kvcache.block_table import BlockRange, BlockTable


def ids(*block_ids: int) -> "array[int]":
    return array("i", block_ids)


def test_drops_from_the_front_once_last_first() -> None:
    table = BlockTable((ids(5, 6, 7, 8), ids(1, 2, 3, 4)), [0, 0])
    assert table.drop_before(0, 2) == ids(6, 5)
    assert table.drop_before(0, 2) == ids()
    assert table.drop_before(0, 1) == ids()
    assert table.drop_before(0, 9) == ids(8, 7)
    assert table.groups == (ids(0, 0, 0, 0), ids(1, 2, 3, 4))
    assert table.num_dropped == [4, 0]
    assert table.num_blocks == 4


def test_entries_without_a_block_are_null_and_counted_apart() -> None:
    table = BlockTable((ids(), ids()), [0, 0])
    table.extend(0, 4, range(4), [5, 6, 7, 8])
    table.extend(1, 4, [1, 3], [3, 4])
    assert table.groups == (ids(5, 6, 7, 8), ids(0, 3, 0, 4))
    assert table.num_held == [4, 2]
    assert table.ranges([0, 2], 4) == (BlockRange(0, (5, 6, 7, 8)), BlockRange(3, (4,)))
    assert table.ranges([0, 2], 3)[1] == BlockRange(3, ())
    assert table.drop_before(1, 3) == ids(0, 3, 0)
    assert table.num_held == [4, 1]
