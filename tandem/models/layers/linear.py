"""A weight and its optional bias, taken by name. The arithmetic is the kernels'."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Linear:
    """The affine map `x @ weight.T + bias`."""

    weight: torch.Tensor  # [out, in]
    bias: torch.Tensor | None  # [out]

    @classmethod
    def take(cls, weights: Mapping[str, torch.Tensor], name: str) -> "Linear":
        """Whether there is a bias is the configuration's choice, which the loader has checked."""
        return cls(weights[f"{name}.weight"], weights.get(f"{name}.bias"))
