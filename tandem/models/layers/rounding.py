"""Rounding of a model's constants to the dtype of its tensors."""

import torch


def rounded(value: float, dtype: torch.dtype) -> float:
    """The nearest value of `dtype`."""
    return float(torch.tensor(value, dtype=dtype))
