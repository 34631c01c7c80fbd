"""The holder table: one generation a key, counts that add up, shared holders."""

import random
import tracemalloc

from tandem.locality.holders import NOBODY, HolderTable, pack, unpack


def key(number: int) -> bytes:
    return number.to_bytes(15, "big")


def test_holders_are_packed_in_order() -> None:
    assert list(unpack(pack({3, 1, 2**32 - 1}))) == [1, 3, 2**32 - 1]
    assert pack(()) == NOBODY


def test_equal_holders_are_one_object() -> None:
    table = HolderTable(1024)
    table.put(key(1), pack([1, 2]))
    table.put(key(2), pack([2, 1]))
    assert table.get(key(1)) is table.get(key(2))


def test_half_the_bound_turns_the_generations() -> None:
    table = HolderTable(20)
    for number in range(11):
        table.put(key(number), pack([1]))
    assert table.num_rotations == 1
    assert [table.is_old(key(number)) for number in (0, 9, 10)] == [True, True, False]
    table.put(key(0), pack([1]))
    assert not table.is_old(key(0))
    for number in range(11, 20):
        table.put(key(number), pack([1]))
    assert table.get(key(1)) == NOBODY
    assert table.get(key(0)) == pack([1])


def test_counts_add_up_whatever_is_put() -> None:
    table, rng = HolderTable(200), random.Random(3)
    for _ in range(5000):
        table.put(key(rng.randrange(150)), pack(range(rng.randrange(4))))
        held = [table.get(key(number)) for number in range(150)]
        assert table.num_block_replicas == sum(len(holders) // 4 for holders in held) <= 200
        assert table.num_blocks == sum(map(bool, held))


def test_a_block_that_everybody_comes_to_hold_does_not_keep_all_its_former_holders() -> None:
    """Each of 3,000 workers in turn adds itself: the lists before it, 18 MB together, were all remembered."""
    table = HolderTable(1 << 20)
    tracemalloc.start()
    for number in range(1, 3001):
        table.put(b"popular", pack(range(number)))
    size_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert table.num_block_replicas == 3000
    assert size_bytes < 4.5e6
