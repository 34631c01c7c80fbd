"""Float weights of the model's dtype: in row order as in checkpoints, or packed for the compiled kernels."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from tandem.architecture.cost import Products
from tandem.architecture.feed_forward import Activation, Clamp
from tandem.architecture.tensors import TensorSpec
from tandem.compute.ops import Experts, Kernels, Matrix
from tandem.compute.order import Order
from tandem.compute.weights.base import ExpertLinears, Linear, Pieces, Weight, expert_weights


@dataclass(frozen=True, slots=True)
class MatrixWeight:
    """Implements `base.Weight` with a float matrix."""

    tensor: torch.Tensor  # [out, in]
    order: Order
    kernels: Kernels
    sum_blocks: int = 1

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
        return Matrix(self.tensor, self.order, self.sum_blocks)

    def __call__(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, *, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        return self.kernels.linear(
            x, self.tensor, bias, out_dtype=out_dtype, order=self.order, sum_blocks=self.sum_blocks
        )

    def gated(
        self, x: torch.Tensor, bias: torch.Tensor | None, up: Linear, activation: Activation
    ) -> torch.Tensor | None:
        other = up.weight.matrix
        if not isinstance(other, Matrix) or other.order is not self.order:
            return None
        return self.kernels.gated_linear(x, self.tensor, other.tensor, activation, bias, up.bias, order=self.order)

    def grouped(self, experts: Sequence[ExpertLinears], activation: Activation, clamp: Clamp | None) -> Experts | None:
        found = expert_weights(experts)
        return None if found is None else self.kernels.experts(activation, clamp, found)


@dataclass(frozen=True, slots=True)
class DenseFormat:
    """Implements `base.WeightFormat`: one tensor of floats, of which a packed copy can be made."""

    kernels: Kernels
    name: str = "dense"

    @property
    def packed(self) -> "PackedDense":
        return PackedDense(self.kernels)

    def refusal(self, weight: TensorSpec) -> str | None:
        return None

    def has_table(self, table: TensorSpec) -> bool:
        return False

    def check_model(self, weights: Sequence[TensorSpec], others: Collection[str]) -> None:
        """Does nothing: floats need no configuration."""

    def ignores(self, name: str, tensor: torch.Tensor) -> bool:
        return False

    def checkpoint_tensors(self, weight: TensorSpec) -> tuple[TensorSpec, ...]:
        return (weight,)

    def memory_tensors(self, weight: TensorSpec) -> tuple[TensorSpec, ...]:
        return (weight,)

    def products(self, weight: TensorSpec) -> Products:
        return Products.FLOATS

    def pieces(self, weight: TensorSpec) -> tuple[TensorSpec, ...]:
        """NOTE: the whole weight, since floats stay in the mapped file."""
        return (weight,)

    def load(self, weight: TensorSpec, pieces: Pieces) -> Weight:
        (parts,) = pieces
        return MatrixWeight(parts[weight.name], Order.ROWS, self.kernels, weight.sum_blocks)


@dataclass(frozen=True, slots=True)
class PackedDense:
    """Implements `base.PackedForm`: strips of 16 transposed rows, of the same size and dtype."""

    kernels: Kernels
    layout: str = "strips-of-16/1"

    def refusal(self, weight: TensorSpec, dtype: str) -> str | None:
        if self.kernels.can_pack(weight.shape, getattr(torch, dtype)):
            return None
        return f"the kernels do not pack {weight.name}, {list(weight.shape)} of {dtype}"

    def stored(self, weight: TensorSpec) -> tuple[TensorSpec, ...]:
        return (weight,)

    def pack(self, weight: TensorSpec, pieces: Pieces) -> Iterator[torch.Tensor]:
        (parts,) = pieces
        yield self.kernels.pack(parts[weight.name])

    def load(self, weight: TensorSpec, parts: Mapping[str, torch.Tensor]) -> Weight:
        packed = parts[weight.name]
        assert packed.data_ptr() % 64 == 0, "it begins at a cache line"
        return MatrixWeight(packed, Order.STRIPS, self.kernels, weight.sum_blocks)
