"""Checksums of whole pages, and how many of a read's blocks are compared."""

import zlib

import pytest
import torch

from tandem.compute.arena import Arena
from tandem.worker.checksums import PageChecksums
from tests.helpers.layouts import layout_of


def arena_of() -> Arena:
    arena = Arena(layout_of(None, block_size=8), 5, torch.device("cpu"))
    arena.pages.view(torch.uint8).random_(generator=torch.Generator().manual_seed(0))
    return arena


def test_every_byte_of_a_page_counts() -> None:
    arena = arena_of()
    checksums = PageChecksums(arena, 1.0)
    before = checksums.arrived([(0, (1,)), (0, (2,)), (0, (3,))], (1, ()))
    assert before[0] == zlib.crc32(arena.pages[1].numpy().tobytes())
    arena.pages[2].view(torch.uint8).view(-1)[-1] ^= 1
    after = checksums.arrived([(0, (1,)), (0, (2,)), (0, (3,))], (1, ()))
    assert [x == y for x, y in zip(before, after, strict=True)] == [True, False, True]


@pytest.mark.parametrize(("share", "count", "expected"), [(1.0, 7, 7), (0.02, 10, 1), (0.5, 8, 4), (0.5, 0, 0)])
def test_a_share_is_compared_at_least_one(share: float, count: int, expected: int) -> None:
    sample = PageChecksums(arena_of(), share).sample([0] * count)
    assert len(set(sample)) == len(sample) == expected
    assert sample == sorted(sample)
    assert all(0 <= position < count for position in sample)


def test_another_sample_is_taken_each_time() -> None:
    checksums = PageChecksums(arena_of(), 0.02)
    assert len({tuple(checksums.sample([0] * 50)) for _ in range(200)}) > 30
