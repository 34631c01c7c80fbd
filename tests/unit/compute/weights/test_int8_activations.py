"""Factors of W8A8 products have the sizes that PyTorch multiplies as integers on CUDA."""

import pytest
import torch

from tandem.compute.weights.int8_activations import padded_for_cuda


@pytest.mark.parametrize("num_tokens", [1, 16, 17, 40])
@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(8, 16), (12, 16), (8, 3), (1, 1), (129, 255)])
def test_any_sizes_are_padded_to_those_of_cuda(num_tokens: int, num_inputs: int, num_outputs: int) -> None:
    """`_int_mm_out_cuda` takes more than 16 rows, and multiples of 8 inputs and outputs."""
    draw = torch.Generator().manual_seed(num_tokens)
    codes = torch.randint(-128, 128, (num_tokens, num_inputs), generator=draw, dtype=torch.int8)
    weights = torch.randint(-128, 128, (num_outputs, num_inputs), generator=draw, dtype=torch.int8)
    rows, columns = padded_for_cuda(codes, weights)
    assert len(rows) > 16
    assert rows.shape[1] == columns.shape[1]
    assert not rows.shape[1] % 8
    assert not len(columns) % 8
    sums = rows.long() @ columns.long().T
    assert torch.equal(sums[:num_tokens, :num_outputs], codes.long() @ weights.long().T)


def test_factors_that_fit_are_not_copied() -> None:
    codes, weights = torch.zeros(17, 16, dtype=torch.int8), torch.zeros(24, 16, dtype=torch.int8)
    rows, columns = padded_for_cuda(codes, weights)
    assert rows is codes
    assert columns is weights
