"""Picks indices by weight, given uniform random numbers, on tensors; the numbers come from `core.randomness`.

Invariant: an index of zero weight is never picked (on an accelerator, but for rounding). Nothing here keeps state.
"""

import torch

from tandem.core.randomness import choice_seed, derived_uniform, uniform

__all__ = ["choice_seed", "derived_uniform", "inverse_cdf", "uniform"]

_MANTISSA_BITS = 53
_WALK_BLOCK = 128  # candidates whose weights are summed before any is looked at


def inverse_cdf(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """Pick one index per row with probability proportional to its weight, walking the row from its start.

    Returns int64 [num_rows]: the first index whose cumulative weight exceeds uniform * total, so an index of zero
    weight is never picked (on an accelerator, but for the rounding of its parallel sums). Wide rows are walked by
    blocks first. A row of NaN gets some valid index.

    Args:
        weights: float [num_rows, num_candidates], not negative, at least one positive.
        uniforms: float64 [num_rows] in [0, 1).
    """
    num_candidates = weights.shape[1]
    if num_candidates <= _WALK_BLOCK:
        return _walk(weights, uniforms)[0]
    padding = -num_candidates % _WALK_BLOCK
    if padding:
        weights = torch.nn.functional.pad(weights, (0, padding))
    blocks = weights.view(weights.shape[0], -1, _WALK_BLOCK)  # [num_rows, num_blocks, _WALK_BLOCK]
    block, share = _walk(blocks.sum(-1), uniforms)
    rows = torch.arange(weights.shape[0], device=weights.device)
    within, _ = _walk(blocks[rows, block], share)
    return (block * _WALK_BLOCK + within).clamp(max=num_candidates - 1)


def _walk(weights: torch.Tensor, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The index picked in each row, and how far into that index's own weight the number fell, in [0, 1)."""
    cumulative = weights.cumsum(-1, dtype=torch.float64)  # [num_rows, num_candidates]
    target = (uniforms * cumulative[:, -1]).unsqueeze(1)  # below the total: it rounds down for any number below one
    picked = torch.searchsorted(cumulative, target, right=True).clamp(max=weights.shape[1] - 1)
    end, weight = cumulative.gather(1, picked), weights.gather(1, picked).to(torch.float64)
    share = (1.0 - (end - target) / weight).clamp(0.0, 1.0 - 2.0**-_MANTISSA_BITS)
    return picked.squeeze(1), share.squeeze(1)
