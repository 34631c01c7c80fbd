import pytest
import torch

from tandem.quantize.hadamard import hadamard


@pytest.mark.parametrize("size", [1, 2, 4, 8, 12, 20, 24, 28, 36, 64, 96, 128, 180, 576, 896])
def test_rows_are_orthogonal_and_of_one_absolute_value(size: int) -> None:
    matrix = hadamard(size)
    assert matrix is not None
    torch.testing.assert_close(matrix @ matrix.T, torch.eye(size, dtype=torch.float64), atol=1e-12, rtol=0)
    torch.testing.assert_close(matrix.abs(), torch.full_like(matrix, size**-0.5), atol=1e-12, rtol=0)


@pytest.mark.parametrize("size", [3, 6, 18, 52, 92])
def test_sizes_without_a_construction(size: int) -> None:
    """There is none of 3, 6 and 18; those of 52 and 92 are not of Paley's with a prime."""
    assert hadamard(size) is None
