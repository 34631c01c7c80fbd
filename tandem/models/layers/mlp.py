"""The gated feed-forward block: `down(activation(gate(x)) * up(x))`."""

from collections.abc import Mapping

import torch

from tandem.architecture.feed_forward import GatedSpec
from tandem.kernels.base import Kernels
from tandem.models.layers.linear import Linear


class GatedMLP:
    """Computes a `GatedSpec` with the tensors that it names."""

    def __init__(self, spec: GatedSpec, weights: Mapping[str, torch.Tensor], kernels: Kernels) -> None:
        self._kernels = kernels
        self._activation = spec.activation
        self._gate = Linear.take(spec.gate, weights, kernels)
        self._up = Linear.take(spec.up, weights, kernels)
        self._down = Linear.take(spec.down, weights, kernels)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`x` [num_tokens, hidden] -> the same shape."""
        gate, up = self._gate, self._up
        return self._down(self._kernels.gated_linear(x, gate.weight, up.weight, self._activation, gate.bias, up.bias))
