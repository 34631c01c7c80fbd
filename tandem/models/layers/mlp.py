"""The gated feed-forward block: `down(activation(gate(x)) * up(x))`."""

from collections.abc import Callable, Mapping

import torch
from torch.nn import functional

from tandem.kernels.base import Activation, Kernels
from tandem.models.layers.linear import Linear

_ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}


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
        return self._kernels.linear(self._gated(x), self._down.weight, self._down.bias)

    def _gated(self, x: torch.Tensor) -> torch.Tensor:
        """[num_tokens, ffn]. NOTE: the fused kernel has no bias; few checkpoints have one, so those take two steps."""
        if self._gate.bias is None:
            return self._kernels.gated_linear(x, self._gate.weight, self._up.weight, self._activation)
        gate = self._kernels.linear(x, self._gate.weight, self._gate.bias)
        up = self._kernels.linear(x, self._up.weight, self._up.bias)
        return _ACTIVATIONS[self._activation](gate).mul_(up)
