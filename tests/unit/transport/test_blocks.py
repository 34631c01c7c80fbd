"""Runs: the same pairs, as few as possible, cut to size."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.core.errors import TransportError
from tandem.transport.blocks import Run, batches, plan_read

NUM_BLOCKS = 40


def pairs(runs: list[Run]) -> list[tuple[int, int]]:
    return [(run.remote + i, run.local + i) for run in runs for i in range(run.num_blocks)]


@st.composite
def reads(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    count = draw(st.integers(1, NUM_BLOCKS - 1))
    order = random.Random(draw(st.integers(0, 2**32)))
    if draw(st.booleans()):
        return order.sample(range(1, NUM_BLOCKS), count), order.sample(range(1, NUM_BLOCKS), count)
    shift = draw(st.integers(0, NUM_BLOCKS - 1 - count))
    remote = list(range(1, count + 1))
    local = [block + shift for block in remote]
    order.shuffle(remote)
    return remote, local


@given(reads())
def test_runs_are_the_same_pairs_and_none_can_be_joined(read: tuple[list[int], list[int]]) -> None:
    runs = plan_read(*read, NUM_BLOCKS, NUM_BLOCKS)
    assert sorted(pairs(runs)) == sorted(zip(*read, strict=True))
    for left, right in itertools.pairwise(runs):
        assert left.remote < right.remote
        assert (left.remote + left.num_blocks, left.local + left.num_blocks) != (right.remote, right.local)


@given(reads(), st.integers(1, 50))
def test_batches_keep_every_pair_in_order_and_their_size(read: tuple[list[int], list[int]], max_blocks: int) -> None:
    runs = plan_read(*read, NUM_BLOCKS, NUM_BLOCKS)
    cut = list(batches(runs, max_blocks))
    assert [pair for batch in cut for pair in pairs(batch)] == pairs(runs)
    sizes = [sum(run.num_blocks for run in batch) for batch in cut]
    assert all(size == max_blocks for size in sizes[:-1])
    assert 1 <= sizes[-1] <= max_blocks


def test_adjacent_blocks_in_any_order_are_one_run() -> None:
    assert plan_read([5, 3, 4], [25, 23, 24], NUM_BLOCKS, NUM_BLOCKS) == [Run(3, 23, 3)]


def test_each_side_has_its_own_range() -> None:
    assert plan_read([99], [1], 100, 2) == [Run(99, 1, 1)]
    with pytest.raises(TransportError, match=r"local block 2 .* 1 to 1 "):
        plan_read([99], [2], 100, 2)
