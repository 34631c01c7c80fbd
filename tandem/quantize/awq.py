"""AWQ (Lin et al. 2023, arXiv:2306.00978): inputs with large activations are scaled up before their weights are
rounded.

The factors are divided out of the norm, or the linear map, that produces the input, so no work is left at run time. The
minimised error is that of the linear maps' own outputs, by the second moments of their inputs; the paper's code
measures the output of the whole block.
"""

from collections.abc import MutableMapping, Sequence
from typing import Final

import torch

from tandem.quantize.grids import Grid
from tandem.quantize.inputs import SharedInput
from tandem.quantize.moments import Moments
from tandem.quantize.rounding import output_error, round_to_nearest

_STEPS: Final = 20  # of the exponent from 0 to 1 (AWQ, section 3.2)
_SMALLEST: Final = 1e-4


def scale_inputs(
    tensors: MutableMapping[str, torch.Tensor], shared: SharedInput, grid: Grid, moments: Moments
) -> Moments:
    """Folds the best factors for the input `shared` into a layer's `tensors`, in place. Returns the moments of the
    scaled inputs, or `moments` itself if nothing can absorb the factors.
    """
    if shared.norm is not None and shared.norm.tensor_name is None:
        return moments
    if shared.norm is None and shared.producer is None:
        return moments
    factors = _search([tensors[name] for name in shared.weights], grid, moments)
    for name in shared.weights:
        tensors[name] = tensors[name] * factors
    if shared.norm is not None:
        assert shared.norm.tensor_name is not None
        offset = float(shared.norm.unit_offset)
        tensors[shared.norm.tensor_name] = (tensors[shared.norm.tensor_name] + offset) / factors - offset
    elif shared.producer is not None:
        producer = shared.producer.name
        tensors[f"{producer}.weight"] = tensors[f"{producer}.weight"] / factors.unsqueeze(1)
        if shared.producer.bias:
            tensors[f"{producer}.bias"] = tensors[f"{producer}.bias"] / factors
    return moments.divided_by(factors)


def _search(weights: Sequence[torch.Tensor], grid: Grid, moments: Moments) -> torch.Tensor:
    """[in], the factors with the least error of all `weights` together; ones if none are better."""
    sizes = moments.mean_absolute.clamp(min=_SMALLEST)
    best, least = torch.ones_like(sizes), float("inf")
    for step in range(_STEPS):
        factors = sizes ** (step / _STEPS)
        factors = factors / (factors.max() * factors.min()).sqrt()
        error = _error(weights, grid, moments, factors)
        if error < least:
            best, least = factors, error
    return best


def _error(weights: Sequence[torch.Tensor], grid: Grid, moments: Moments, factors: torch.Tensor) -> float:
    scaled = [weight * factors for weight in weights]
    fitted = grid.fitted(scaled)
    changes = [round_to_nearest(weight, fitted).decoded() / factors for weight in scaled]
    return sum(output_error(change - weight, moments.second) for change, weight in zip(changes, weights, strict=True))
