"""Weights as floats of the model's dtype: row by row as checkpoints have them, or packed for the compiled kernels."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from tandem.architecture.feed_forward import Activation, Clamp
from tandem.architecture.tensors import TensorSpec
from tandem.compute.ops import Experts, ExpertWeights, Kernels, Matrix
from tandem.compute.order import Order
from tandem.compute.weights.base import ExpertLinears, Linear, Weight


@dataclass(frozen=True, slots=True)
class MatrixWeight:
    """Implements `Weight` by the kernels' products of a matrix."""

    tensor: torch.Tensor  # [out, in]
    order: Order
    kernels: Kernels

    @property
    def shape(self) -> tuple[int, int]:
        outputs, inputs = self.tensor.shape
        return outputs, inputs

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def num_bytes(self) -> int:
        return self.tensor.nbytes

    @property
    def matrix(self) -> Matrix:
        return Matrix(self.tensor, self.order)

    def __call__(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, *, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        return self.kernels.linear(x, self.tensor, bias, out_dtype=out_dtype, order=self.order)

    def gated(
        self, x: torch.Tensor, bias: torch.Tensor | None, up: Linear, activation: Activation
    ) -> torch.Tensor | None:
        other = up.weight.matrix
        if other is None or other.order is not self.order:
            return None
        return self.kernels.gated_linear(x, self.tensor, other.tensor, activation, bias, up.bias, order=self.order)

    def grouped(self, experts: Sequence[ExpertLinears], activation: Activation, clamp: Clamp | None) -> Experts | None:
        found = [_matrices(expert) for expert in experts]
        if any(matrices is None for matrices in found):
            return None
        return self.kernels.experts(activation, clamp, [matrices for matrices in found if matrices is not None])


def _matrices(expert: ExpertLinears) -> ExpertWeights | None:
    gate, up, down = expert.gate.weight.matrix, expert.up.weight.matrix, expert.down.weight.matrix
    if gate is None or up is None or down is None:
        return None
    return ExpertWeights(gate, up, down, expert.gate.bias, expert.up.bias, expert.down.bias)


@dataclass(frozen=True, slots=True)
class DenseFormat:
    """Implements `WeightFormat`: one tensor of floats, a copy of which can be packed."""

    kernels: Kernels
    name: str = "dense"

    @property
    def packed(self) -> "PackedDense":
        return PackedDense(self.kernels)

    def refusal(self, weight: TensorSpec) -> str | None:
        return None

    def wants(self, weight: TensorSpec) -> tuple[TensorSpec, ...]:
        return (weight,)

    def load(self, weight: TensorSpec, parts: Mapping[str, torch.Tensor]) -> Weight:
        return MatrixWeight(parts[weight.name], Order.ROWS, self.kernels)


@dataclass(frozen=True, slots=True)
class PackedDense:
    """Implements `PackedForm`: strips of 16 rows turned round, of the same size and dtype."""

    kernels: Kernels
    layout: str = "strips-of-16/1"

    def refusal(self, weight: TensorSpec, dtype: str) -> str | None:
        if self.kernels.can_pack(weight.shape, getattr(torch, dtype)):
            return None
        return f"the kernels do not pack {weight.name}, {list(weight.shape)} of {dtype}"

    def stored(self, weight: TensorSpec) -> tuple[TensorSpec, ...]:
        return (weight,)

    def pack(self, weight: TensorSpec, parts: Mapping[str, torch.Tensor]) -> Iterator[torch.Tensor]:
        yield self.kernels.pack(parts[weight.name])

    def load(self, weight: TensorSpec, parts: Mapping[str, torch.Tensor]) -> Weight:
        packed = parts[weight.name]
        assert packed.data_ptr() % 64 == 0, "it begins at a cache line"
        return MatrixWeight(packed, Order.STRIPS, self.kernels)
