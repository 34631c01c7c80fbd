"""Huge pages are a wish: what is tested is that nothing else changes, and when reading ends."""

import os
from pathlib import Path

import pytest
import torch

from tandem.compute.huge_pages import LEAST_BYTES, PIECE_BYTES, advise_huge_pages, cache_in_huge_pages


def _write(path: Path, num_bytes: int) -> bytes:
    """In small pieces, so that the page cache has it in small pages."""
    generator = torch.Generator().manual_seed(0)
    content = torch.randint(256, (num_bytes,), dtype=torch.uint8, generator=generator).numpy().tobytes()
    with path.open("wb", buffering=0) as file:
        for start in range(0, num_bytes, 16384):
            file.write(content[start : start + 16384])
        os.fsync(file.fileno())
    return content


def _is_possible_in(directory: Path) -> bool:
    path = directory / "probe"
    _write(path, PIECE_BYTES)
    return cache_in_huge_pages(path, clock=lambda: 0.0) > 0


def test_a_file_keeps_its_content(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    content = _write(path, LEAST_BYTES + 12345)
    assert 0 <= cache_in_huge_pages(path) <= len(content)
    assert path.read_bytes() == content


@pytest.mark.parametrize("num_bytes", [0, 1, LEAST_BYTES - 1])
def test_small_files_are_left_alone(tmp_path: Path, num_bytes: int) -> None:
    _write(tmp_path / "weights", num_bytes)
    assert cache_in_huge_pages(tmp_path / "weights") == 0


def test_a_file_that_is_not_there_is_not_its_business(tmp_path: Path) -> None:
    """The next attempt to open it reports a better error."""
    assert cache_in_huge_pages(tmp_path / "weights") == 0


@pytest.mark.slow
def test_pieces_are_read_until_one_comes_slowly(tmp_path: Path) -> None:
    if not _is_possible_in(tmp_path):
        pytest.skip("this file system or kernel gives files no huge pages")
    size = 2 * PIECE_BYTES + LEAST_BYTES
    _write(tmp_path / "slow", size)
    _write(tmp_path / "fast", size)
    hours = iter(range(0, 10**9, 3600))
    assert cache_in_huge_pages(tmp_path / "slow", clock=lambda: float(next(hours))) == PIECE_BYTES
    assert cache_in_huge_pages(tmp_path / "fast", clock=lambda: 0.0) == size
    assert cache_in_huge_pages(tmp_path / "fast", clock=lambda: float(next(hours))) == size, "nothing is read again"


def test_tensors_keep_their_values() -> None:
    small, large = torch.arange(10), torch.arange(LEAST_BYTES // 4, dtype=torch.int32)
    for tensor in (small, large, large[5:], torch.empty(0)):
        before = tensor.clone()
        advise_huge_pages(tensor)
        assert torch.equal(tensor, before)
