"""Feed-forward blocks of two or three linear maps: gated ones and those with a squared ReLU."""

import torch

from tandem.architecture.feed_forward import BlockSpec, Clamp, GatedSpec, SquaredReluSpec
from tandem.compute.ops import Kernels
from tandem.models.layers.sigmoid import rowwise_sigmoid
from tandem.models.parameters import Parameters


class GatedMLP:
    """Computes a `GatedSpec` with the tensors that it names."""

    graph_safe = True

    def __init__(self, spec: GatedSpec, parameters: Parameters, kernels: Kernels) -> None:
        self._kernels = kernels
        self._activation = spec.activation
        self._clamp = spec.clamp
        self._gate = parameters.linear(spec.gate)
        self._up = parameters.linear(spec.up)
        self._down = parameters.linear(spec.down)

    def __call__(
        self, x: torch.Tensor, input_ids: torch.Tensor | None = None, *, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """`x` [num_tokens, hidden] -> the same shape, as `out_dtype`; None = the dtype of `x`."""
        gate, up = self._gate, self._up
        if self._clamp is not None:
            return self._down(_clamped(gate(x), up(x), self._clamp), out_dtype=out_dtype)
        gated = gate.gated(x, up, self._activation)
        if gated is None:
            gated = self._kernels.gated_product(gate(x), up(x), self._activation)
        return self._down(gated, out_dtype=out_dtype)


class SquaredReluMLP:
    """Computes a `SquaredReluSpec` with the tensors that it names."""

    graph_safe = True

    def __init__(self, spec: SquaredReluSpec, parameters: Parameters, kernels: Kernels) -> None:
        self._up = parameters.linear(spec.up)
        self._down = parameters.linear(spec.down)

    def __call__(
        self, x: torch.Tensor, input_ids: torch.Tensor | None = None, *, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """`x` [num_tokens, hidden] -> the same shape, as `out_dtype`; None = the dtype of `x`."""
        return self._down(self._up(x).relu_().square_(), out_dtype=out_dtype)


def build_block(spec: BlockSpec, parameters: Parameters, kernels: Kernels) -> GatedMLP | SquaredReluMLP:
    """The block that computes `spec`."""
    if isinstance(spec, SquaredReluSpec):
        return SquaredReluMLP(spec, parameters, kernels)
    return GatedMLP(spec, parameters, kernels)


def _clamped(gate: torch.Tensor, up: torch.Tensor, clamp: Clamp) -> torch.Tensor:
    gate, up = gate.clamp(max=clamp.limit), up.clamp(-clamp.limit, clamp.limit)
    return (up + clamp.shift) * (gate * rowwise_sigmoid(gate * clamp.alpha))
