"""Constants of a model as its tensors' dtype has them."""

import torch


def rounded(value: float, dtype: torch.dtype) -> float:
    """The nearest value of `dtype`."""
    return float(torch.tensor(value, dtype=dtype))
