"""The gated feed-forward block: `down(activation(gate(x)) * up(x))`."""

from collections.abc import Mapping

import torch

from tandem.kernels.base import Activation, Kernels
from tandem.models.layers.linear import Linear


class GatedMLP:
    """Takes `{prefix}.gate_proj`, `up_proj` and `down_proj` from `weights`."""

    def __init__(
        self, weights: Mapping[str, torch.Tensor], prefix: str, activation: Activation, kernels: Kernels
    ) -> None:
        self._kernels = kernels
        self._activation = activation
        self._gate = Linear.take(weights, f"{prefix}.gate_proj")
        self._up = Linear.take(weights, f"{prefix}.up_proj")
        self._down = Linear.take(weights, f"{prefix}.down_proj")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`x` [num_tokens, hidden] -> the same shape."""
        gate, up, down = self._gate, self._up, self._down
        gated = self._kernels.gated_linear(x, gate.weight, up.weight, self._activation, gate.bias, up.bias)
        return self._kernels.linear(gated, down.weight, down.bias)
