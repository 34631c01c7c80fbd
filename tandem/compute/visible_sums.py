"""Sums of values weighted by attention, into which nothing comes from a value that a row does not see.

The weight of such a value is 0. But 0 times an infinite value or NaN is NaN, and a later token (a draft that is then
rejected) may have one.
"""

import torch


def visible_sums(weights: torch.Tensor, values: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """The sums, [num_heads, num_rows, size].

    Args:
        weights: [num_heads, num_rows, num_keys], 0 of each key that a row does not see.
        values: [num_heads, num_keys, size]; those that no row sees may hold anything.
        visible: bool [num_rows, num_keys].
    """
    hidden = (~visible.all(0)).nonzero().squeeze(1)  # from some row
    harmful = hidden[~values[:, hidden].isfinite().all(2).all(0)]
    if not len(harmful):
        return weights @ values
    sums = weights @ values.index_fill(1, harmful, 0.0)
    for key in harmful[visible[:, harmful].any(0)].tolist():
        sums += torch.where(visible[:, key, None], weights[:, :, key, None] * values[:, None, key], 0.0)
    return sums
