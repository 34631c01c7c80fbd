"""Sigmoid and softplus that are row-wise: an element's bits do not depend on how many tokens share its tensor.

PyTorch's own functions round differently on the CPU for elements at the end of a tensor; its softmax does not.
"""

import torch


def rowwise_sigmoid(x: torch.Tensor) -> torch.Tensor:
    """Sigmoid of a tensor of any shape and floating dtype, in the same shape and dtype."""
    return torch.stack((x, torch.zeros_like(x)), dim=-1).softmax(-1)[..., 0]


def rowwise_softplus(x: torch.Tensor) -> torch.Tensor:
    """`ln(1 + exp(x))` of a float32 tensor of any shape, in float32; computed in float64, so that small results are
    precise.
    """
    wide = x.double()
    return torch.stack((torch.zeros_like(wide), wide), dim=-1).log_softmax(-1)[..., 0].neg().float()
