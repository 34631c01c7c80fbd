"""Rounding of a weight to a grid: each number to the nearest, or with error feedback to later inputs (GPTQ).

`second_moments` is the sum of `x^T x` over calibration tokens, [in, in] float32. A change D of the weight causes the
error `tr(D second_moments D^T)` in the outputs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from tandem.quantize.grids import Grid, spread

_DAMPING: Final = 0.01  # share of the mean of the diagonal (GPTQ, section 3.3, step 3)
_MOST_DAMPING: Final = 1.0
_COLUMNS: Final = 32  # of a block (GPTQ, section 3.3, step 2, has 128), so few that its errors stay in the CPU cache
_SHRINKAGES: Final = tuple(1 - step / 20 for step in range(9))  # factors of the maximum tried for a scale, 1 to 0.6


@dataclass(frozen=True, slots=True)
class Rounded:
    """A rounded weight: `numbers` [out, in] of a grid and `scales` [out, groups]."""

    numbers: torch.Tensor
    scales: torch.Tensor

    def split(self, weights: Sequence[torch.Tensor]) -> "list[Rounded]":
        """Splits it into one for each of `weights` [out, in], whose outputs are concatenated here."""
        sizes = [len(weight) for weight in weights]
        pairs = zip(torch.split(self.numbers, sizes), torch.split(self.scales, sizes), strict=True)
        return [Rounded(numbers, scales) for numbers, scales in pairs]

    def decoded(self) -> torch.Tensor:
        """The weight as float32 [out, in]."""
        return self.numbers * spread(self.scales, self.numbers.shape[1])


def round_to_nearest(weight: torch.Tensor, grid: Grid) -> Rounded:
    """Rounds each number of `weight` [out, in] to the nearest, with scales from the absolute maxima."""
    scales = grid.scales(_absmax(weight, grid))
    return Rounded(grid.nearest(weight / spread(scales, weight.shape[1])), scales)


def round_clipped(weight: torch.Tensor, grid: Grid, second_moments: torch.Tensor) -> Rounded:
    """As `round_to_nearest`, with the scale of each group that makes the least error, beyond which numbers are clipped.

    The errors of inputs are weighted by the diagonal of `second_moments`.
    """
    scales = choose_scales(weight, grid, second_moments)
    return Rounded(grid.nearest(weight / spread(scales, weight.shape[1])), scales)


def choose_scales(weight: torch.Tensor, grid: Grid, second_moments: torch.Tensor) -> torch.Tensor:
    """Chooses scales [out, groups]; see `round_clipped`."""
    absmax, inputs = _absmax(weight, grid), weight.shape[1]
    importance = second_moments.diagonal()
    best: torch.Tensor | None = None
    least = torch.empty(0)
    for shrinkage in _SHRINKAGES:
        scales = grid.scales(absmax * shrinkage)
        wide = spread(scales, inputs)
        errors = (grid.nearest(weight / wide) * wide - weight).square_() * importance
        error = _grouped(errors, grid).sum(-1)
        if best is None:
            best, least = scales, error
        else:
            better = error < least
            best, least = torch.where(better, scales, best), torch.where(better, error, least)
    assert best is not None
    return best


def round_with_feedback(weight: torch.Tensor, grid: Grid, second_moments: torch.Tensor) -> Rounded:
    """GPTQ (Frantar et al. 2022, arXiv:2210.17323, algorithm 1): columns are rounded one after the other, those with
    the largest second moments first. The error that each adds to the outputs is compensated in the columns after it.

    Scales are chosen before any column is rounded, so that the order of columns does not show in the result's layout.
    Columns of inputs that calibration never saw are rounded to the nearest, not set to 0 as in the paper's code.
    """
    inputs = weight.shape[1]
    scales = choose_scales(weight, grid, second_moments)
    order = second_moments.diagonal().argsort(descending=True, stable=True)
    wide = spread(scales, inputs).T[order].contiguous()  # NOTE: [in, out] here, so that columns are contiguous
    left = weight.T[order].contiguous()
    factor = _inverse_factor(second_moments[order][:, order])
    numbers = torch.empty_like(left)
    for start in range(0, inputs, _COLUMNS):
        stop = min(start + _COLUMNS, inputs)
        errors = torch.empty(stop - start, len(weight))
        for column in range(start, stop):
            numbers[column] = grid.nearest(left[column] / wide[column])
            error = (left[column] - numbers[column] * wide[column]) / factor[column, column]
            left[column:stop].addr_(factor[column, column:stop], error, alpha=-1.0)
            errors[column - start] = error
        left[stop:].addmm_(factor[start:stop, stop:].T, errors, alpha=-1.0)
    return Rounded(numbers[order.argsort()].T.contiguous(), scales)


def output_error(change: torch.Tensor, second_moments: torch.Tensor) -> float:
    """Sum of squares by which the outputs change if a weight changes by `change` [out, in]."""
    return max(0.0, float(((change @ second_moments) * change).sum(dtype=torch.float64)))


def _inverse_factor(second_moments: torch.Tensor) -> torch.Tensor:
    """Upper triangular R with `R^T R` the inverse of the damped matrix; damped more if it is not positive definite.

    R is the inverse of the upper U with `U U^T` the matrix, which is the Cholesky factor of the matrix in reverse.
    """
    reverse = second_moments.double().flip(0, 1)
    mean = float(reverse.diagonal().mean()) or 1.0
    unit = torch.eye(len(reverse), dtype=torch.float64)
    damping = _DAMPING
    while True:
        lower, failed = torch.linalg.cholesky_ex(reverse + unit * (damping * mean))
        if not int(failed) or damping >= _MOST_DAMPING:
            break
        damping *= 10
    inverse: torch.Tensor = torch.linalg.solve_triangular(lower.flip(0, 1), unit, upper=True)
    return inverse.float()


def _grouped(weight: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Reshapes [out, in] to [out, groups, inputs of a group]."""
    outputs, inputs = weight.shape
    return weight.reshape(outputs, -1, grid.group_size or inputs)


def _absmax(weight: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Absolute maximum of each group, [out, groups]."""
    return _grouped(weight, grid).abs().amax(-1)
