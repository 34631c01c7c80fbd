"""GPTQ against the update that it stands for, computed naively; and the searches for scales."""

import pytest
import torch

from tandem.quantize.grids import Grid, IntegerGrid, Mxfp4Grid, spread
from tandem.quantize.rounding import (
    choose_scales,
    output_error,
    round_clipped,
    round_to_nearest,
    round_with_feedback,
)

INT4 = IntegerGrid(4, 16, torch.bfloat16)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def correlated_moments(inputs: int, rows: int = 400) -> torch.Tensor:
    x = random(rows, inputs, seed=1) @ random(inputs, inputs, seed=2) * torch.linspace(0.2, 3, inputs)
    return x.T @ x


def naive_feedback(weight: torch.Tensor, grid: Grid, moments: torch.Tensor) -> torch.Tensor:
    """Columns in falling order of the diagonal: round one, move those left by the optimal brain surgeon's update, whose
    inverse is computed anew for what is left.
    """
    inputs = weight.shape[1]
    damped = moments.double() + 0.01 * moments.diagonal().double().mean() * torch.eye(inputs)
    scales = spread(choose_scales(weight, grid, moments), inputs).double()
    left, numbers = weight.double().clone(), torch.empty(weight.shape, dtype=torch.float64)
    rest = moments.diagonal().argsort(descending=True, stable=True).tolist()
    while rest:
        column, inverse = rest[0], torch.linalg.inv(damped[rest][:, rest])
        numbers[:, column] = grid.nearest(left[:, column] / scales[:, column])
        error = (left[:, column] - numbers[:, column] * scales[:, column]) / inverse[0, 0]
        left[:, rest] -= torch.outer(error, inverse[0])
        rest = rest[1:]
    return numbers.float()


@pytest.mark.parametrize("inputs", [16, 80])
def test_feedback_is_that_of_the_optimal_brain_surgeon(inputs: int) -> None:
    """More inputs than a block of columns, too."""
    weight, moments = random(12, inputs), correlated_moments(inputs)
    found = round_with_feedback(weight, INT4, moments).numbers
    wanted = naive_feedback(weight, INT4, moments)
    assert (found != wanted).float().mean() < 0.01  # NOTE: float32 here, so a tie may fall to the other side


@pytest.mark.parametrize("grid", [INT4, Mxfp4Grid()], ids=["int4", "mxfp4"])
def test_feedback_lessens_the_error_of_the_outputs(grid: Grid) -> None:
    weight, moments = random(32, 96), correlated_moments(96)
    errors = [
        output_error(rounded.decoded() - weight, moments)
        for rounded in (round_with_feedback(weight, grid, moments), round_to_nearest(weight, grid))
    ]
    assert errors[0] < 0.5 * errors[1]


def test_weights_on_the_grid_stay() -> None:
    weight = INT4.nearest(5 * random(4, 32)) * 0.25
    weight[:, ::16] = -2.0  # NOTE: -8 is the far end of the range, from which the scale follows
    moments = correlated_moments(32)
    assert torch.equal(round_with_feedback(weight * 15 / 16, INT4, moments).numbers.abs().amax(), torch.tensor(8.0))


def test_inputs_that_were_never_seen_are_rounded_to_the_nearest() -> None:
    """An expert that no token of the calibration chose keeps its weights."""
    weight = random(8, 32)
    unseen = round_with_feedback(weight, INT4, torch.zeros(32, 32))
    assert torch.equal(unseen.decoded(), round_to_nearest(weight, INT4).decoded())
    moments = correlated_moments(32)
    moments[:, 3] = moments[3] = 0.0
    some = round_with_feedback(weight, INT4, moments)
    nearest = INT4.nearest(weight / spread(some.scales, 32))
    assert torch.equal(some.numbers[:, 3], nearest[:, 3])


def test_fewer_rows_than_inputs_are_enough() -> None:
    weight = random(8, 64)
    rounded = round_with_feedback(weight, INT4, correlated_moments(64, rows=3))
    assert rounded.decoded().isfinite().all()


def test_clipping_weighs_inputs_by_their_size() -> None:
    """An outlier of a weight is clipped where its input is small, for the others' sake."""
    weight = random(1, 16).clamp(-1, 1)
    weight[0, 5] = 1.5
    moments = torch.eye(16)
    moments[5, 5] = 1e-3
    clipped, plain = round_clipped(weight, INT4, moments), round_to_nearest(weight, INT4)
    assert clipped.scales.item() < plain.scales.item()
    assert output_error(clipped.decoded() - weight, moments) < output_error(plain.decoded() - weight, moments)


def test_the_error_of_outputs_is_that_of_the_rows() -> None:
    x, change = random(50, 16), random(4, 16, seed=3)
    assert output_error(change, x.T @ x) == pytest.approx(float((x @ change.T).square().sum()), rel=1e-5)
