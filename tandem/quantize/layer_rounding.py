"""Rounding of the weights of one layer by the chosen method (nearest, GPTQ or AWQ), and measurement of the errors."""

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Final

import torch

from tandem.core.errors import UnsupportedCheckpointError
from tandem.quantize.awq import scale_inputs
from tandem.quantize.coded_layer import GridWeight, WeightError
from tandem.quantize.evaluation import relative_error
from tandem.quantize.grids import Grid
from tandem.quantize.inputs import SharedInput
from tandem.quantize.moments import Moments
from tandem.quantize.recipe import Method
from tandem.quantize.rounding import Rounded, output_error, round_clipped, round_to_nearest, round_with_feedback

LEAST_ROWS: Final = 32
"""Input rows. NOTE: fewer say too little of an expert's inputs: a method would fit its weights to them alone."""


def round_layer(
    tensors: MutableMapping[str, torch.Tensor],
    inputs: tuple[SharedInput, ...],
    method: Method,
    grid: Grid,
    moments: Mapping[str, Moments],
) -> tuple[dict[str, GridWeight], list[WeightError]]:
    """Returns the quantised weights by name, and their errors.

    Weights of which calibration has seen fewer than `LEAST_ROWS` input rows, such as experts that few tokens chose, are
    rounded to the nearest.

    Args:
        tensors: the layer's parameters, float32; AWQ replaces those that absorb its factors.
        moments: moments of the input of each `SharedInput`, by the name of its first weight; empty for `rtn`.

    Raises:
        UnsupportedCheckpointError: weights or the model's activations are not finite.
    """
    coded: dict[str, GridWeight] = {}
    errors: list[WeightError] = []
    for shared in inputs:
        seen = moments.get(shared.weights[0])
        if seen is not None and not seen.second.isfinite().all():
            raise UnsupportedCheckpointError(
                f"{shared.weights[0]} is multiplied by numbers that are not finite; use --method=rtn, which needs none"
            )
        used = method if seen is None or seen.num_rows >= LEAST_ROWS else "rtn"
        if seen is not None and used == "awq":
            seen = scale_inputs(tensors, shared, grid, seen)
        weights = [tensors[name] for name in shared.weights]
        _refuse_infinite(shared.weights, weights)
        fitted = grid.fitted(weights)
        together = _rounded(torch.cat(weights), fitted, used, seen)  # NOTE: no output's numbers depend on another's
        for name, weight, rounded in zip(shared.weights, weights, together.split(weights), strict=True):
            coded[name] = GridWeight(rounded, fitted)
            error = _error(name, weight, rounded.decoded(), seen)
            errors.append(error if seen is None else replace(error, num_rows=seen.num_rows, is_fallback=used != method))
    return coded, errors


def _refuse_infinite(names: Sequence[str], weights: Sequence[torch.Tensor]) -> None:
    for name, weight in zip(names, weights, strict=True):
        if not weight.isfinite().all():
            raise UnsupportedCheckpointError(
                f"{name} has numbers that are not finite, which no format has; download the weights again"
            )


def _rounded(weight: torch.Tensor, grid: Grid, method: Method, moments: Moments | None) -> Rounded:
    if moments is None or method == "rtn":
        return round_to_nearest(weight, grid)
    if method == "gptq":
        return round_with_feedback(weight, grid, moments.second)
    return round_clipped(weight, grid, moments.second)


def _error(name: str, before: torch.Tensor, after: torch.Tensor, moments: Moments | None) -> WeightError:
    of_numbers = relative_error(before, after)
    size = 0.0 if moments is None else output_error(before, moments.second)
    if moments is None or size == 0.0:
        return WeightError(name, of_numbers, None)
    return WeightError(name, of_numbers, (output_error(after - before, moments.second) / size) ** 0.5)
