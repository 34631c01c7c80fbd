"""The gated feed-forward block: `down(activation(gate(x)) * up(x))`."""

from collections.abc import Mapping

import torch

from tandem.architecture.feed_forward import Clamp, GatedSpec
from tandem.compute.ops import Kernels
from tandem.models.layers.linear import Linear
from tandem.models.layers.sigmoid import rowwise_sigmoid


class GatedMLP:
    """Computes a `GatedSpec` with the tensors that it names."""

    graph_safe = True

    def __init__(self, spec: GatedSpec, weights: Mapping[str, torch.Tensor], kernels: Kernels) -> None:
        self._kernels = kernels
        self._activation = spec.activation
        self._clamp = spec.clamp
        self._gate = Linear.take(spec.gate, weights, kernels)
        self._up = Linear.take(spec.up, weights, kernels)
        self._down = Linear.take(spec.down, weights, kernels)

    def __call__(self, x: torch.Tensor, *, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """`x` [num_tokens, hidden] -> the same shape, of its dtype or float32."""
        gate, up = self._gate, self._up
        if self._clamp is not None:
            return self._down(_clamped(gate(x), up(x), self._clamp), out_dtype=out_dtype)
        gated = self._kernels.gated_linear(x, gate.weight, up.weight, self._activation, gate.bias, up.bias)
        return self._down(gated, out_dtype=out_dtype)


def _clamped(gate: torch.Tensor, up: torch.Tensor, clamp: Clamp) -> torch.Tensor:
    gate, up = gate.clamp(max=clamp.limit), up.clamp(-clamp.limit, clamp.limit)
    return (up + 1) * (gate * rowwise_sigmoid(gate * clamp.alpha))
