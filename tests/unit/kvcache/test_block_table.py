from tandem.kvcache.block_table import BlockRange, BlockTable


def test_drops_from_the_front_once_last_first() -> None:
    table = BlockTable(([5, 6, 7, 8], [1, 2, 3, 4]), [0, 0])
    assert table.drop_before(0, 2) == [6, 5]
    assert table.drop_before(0, 2) == []
    assert table.drop_before(0, 1) == []
    assert table.drop_before(0, 9) == [8, 7]
    assert table.groups == ([0, 0, 0, 0], [1, 2, 3, 4])
    assert table.num_dropped == [4, 0]
    assert table.num_blocks == 4


def test_entries_without_a_block_are_null_and_counted_apart() -> None:
    table = BlockTable(([], []), [0, 0])
    table.extend(0, 4, range(4), [5, 6, 7, 8])
    table.extend(1, 4, [1, 3], [3, 4])
    assert table.groups == ([5, 6, 7, 8], [0, 3, 0, 4])
    assert table.num_held == [4, 2]
    assert table.ranges([0, 2], 4) == (BlockRange(0, (5, 6, 7, 8)), BlockRange(3, (4,)))
    assert table.ranges([0, 2], 3)[1] == BlockRange(3, ())
    assert table.drop_before(1, 3) == [0, 3, 0]
    assert table.num_held == [4, 1]
