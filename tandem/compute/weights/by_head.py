"""A linear map of each head by floats that were computed at load, as those of latents to keys and values."""

import torch

from tandem.compute.ops import Kernels
from tandem.compute.order import Order


class LinearByHead:
    """Multiplies each head by its own matrix of `weight` [heads, out, in], which is packed if the kernels can."""

    def __init__(self, weight: torch.Tensor, kernels: Kernels) -> None:
        self._kernels = kernels
        self._order = Order.ROWS
        if kernels.can_pack(tuple(weight.shape[1:]), weight.dtype):
            weight, self._order = torch.stack([kernels.pack(matrix) for matrix in weight]), Order.STRIPS
        self._weight = weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`x` [num_tokens, heads, in] to [num_tokens, heads, out]."""
        return self._kernels.linear_by_head(x, self._weight, order=self._order)
