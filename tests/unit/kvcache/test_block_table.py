from tandem.kvcache.block_table import BlockTable


def test_drops_from_the_front_once_last_first() -> None:
    table = BlockTable(([5, 6, 7, 8], [1, 2, 3, 4]), [0, 0])
    assert table.drop_before(0, 2) == [6, 5]
    assert table.drop_before(0, 2) == []
    assert table.drop_before(0, 1) == []
    assert table.drop_before(0, 9) == [8, 7]
    assert table.groups == ([0, 0, 0, 0], [1, 2, 3, 4])
    assert table.num_dropped == [4, 0]
    assert table.num_blocks == 4
