"""Checksums that are put together from those of several hosts, and numbers that are not finite."""

import random
import zlib

import pytest
import torch

from tandem.compute.page_bytes import LocalPageBytes, NumberParts, joined_crc32


@pytest.mark.parametrize("num_bytes", [0, 1, 7, 64, 4097, 1 << 20])
def test_a_joined_checksum_is_that_of_all_bytes(num_bytes: int) -> None:
    rng = random.Random(num_bytes)
    first, second = rng.randbytes(33), rng.randbytes(num_bytes)
    assert joined_crc32(zlib.crc32(first), zlib.crc32(second), num_bytes) == zlib.crc32(first + second)
    assert joined_crc32(0, zlib.crc32(second), num_bytes) == zlib.crc32(second), "as of nothing before it"


def test_parts_of_pages_are_one_string_of_bytes() -> None:
    pages = torch.arange(2 * 3 * 16, dtype=torch.uint8).view(2, 3, 16)
    found = LocalPageBytes(pages).crc32s([[(1, 2, 4, 8), (0, 1, 0, 16)], []])
    assert found == [zlib.crc32(bytes(pages[1, 2, 4:8].tolist() + pages[0, 1].tolist())), 0]


def test_a_number_that_is_not_finite_is_found_on_any_page() -> None:
    pages = torch.zeros(2, 200, 8, dtype=torch.uint8)
    wanted = [NumberParts(rank, tuple(range(1, 200)), 4, 8, "float32") for rank in (0, 1)]
    assert LocalPageBytes(pages).are_finite(wanted) == [True, True]
    pages[1, 150, 4:].view(torch.float32)[0] = torch.nan
    assert LocalPageBytes(pages).are_finite(wanted) == [True, False]
    pages[1, 150, 4:] = 0
    pages[0, 3, :4].view(torch.float32)[0] = torch.inf
    assert LocalPageBytes(pages).are_finite(wanted) == [True, True], "elsewhere on the page"
