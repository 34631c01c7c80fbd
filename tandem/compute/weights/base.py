"""Interface between layers and the storage formats of their weights: a `WeightFormat` loads a `Weight`, which layers
call.

A format knows from which tensors of a checkpoint a weight is made and, with its packed form, what is stored in a file
that all processes of a machine map. Layers and decoder call weights and know no format.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from tandem.architecture.cost import Products
from tandem.architecture.feed_forward import Activation, Clamp
from tandem.architecture.tensors import TensorSpec
from tandem.compute.ops import Experts, ExpertWeights, Numbers


class Weight(Protocol):
    """Weight [out, in] of a linear map, and products with it. Row-wise."""

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def dtype(self) -> torch.dtype | None:
        """Dtype of the rows that it can multiply; None = any float dtype."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes in memory, including scales and the like."""
        ...

    @property
    def matrix(self) -> Numbers | None:
        """The numbers for kernel calls that fuse several products; None = such calls cannot use this weight."""
        ...

    def __call__(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, *, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """`x` [num_tokens, in] -> `x @ weight.T + bias`, [num_tokens, out], of the dtype of `x` or float32.

        `bias`: [out].
        """
        ...

    def gated(
        self, x: torch.Tensor, bias: torch.Tensor | None, up: "Linear", activation: Activation
    ) -> torch.Tensor | None:
        """`activation(x @ weight.T + bias) * up(x)`, [num_tokens, out]; None = there is no call for both weights."""
        ...

    def grouped(
        self, experts: "Sequence[ExpertLinears]", activation: Activation, clamp: Clamp | None
    ) -> Experts | None:
        """A layer's experts as one call; this weight is the first one's gate. None = no call for such experts."""
        ...


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Dtype and shape of one tensor, from the header of a checkpoint. `name`: its name in the checkpoint."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    name: str


Choice = Callable[[TensorSpec], str | None]
"""Returns the reason why a weight does not have a format; None = it has."""

StoredTensors = Mapping[str, StoredTensor]
"""The tensors of a checkpoint, by the names that specs have for them (`Source.tensor`). None in place of them: the
checkpoint is not open, and a format follows from the configuration alone.
"""


@dataclass(frozen=True, slots=True)
class Linear:
    """The affine map `(x @ weight.T + bias) * scale`."""

    weight: Weight
    bias: torch.Tensor | None  # [out]
    scale: float = 1.0

    def __call__(self, x: torch.Tensor, *, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """[num_tokens, in] -> [num_tokens, out], of the dtype of `x` or float32."""
        product = self.weight(x, self.bias, out_dtype=out_dtype)
        return product if self.scale == 1.0 else product.mul_(self.scale)

    def gated(self, x: torch.Tensor, up: "Linear", activation: Activation) -> torch.Tensor | None:
        """`activation(self(x)) * up(x)`, [num_tokens, out]; None = there is no call for it."""
        if (self.scale, up.scale) != (1.0, 1.0):
            return None
        return self.weight.gated(x, self.bias, up, activation)


@dataclass(frozen=True, slots=True)
class ExpertLinears:
    """The linear maps of one expert, a gated block."""

    gate: Linear
    up: Linear
    down: Linear


def expert_weights(experts: Sequence[ExpertLinears]) -> list[ExpertWeights] | None:
    """The numbers of the experts' weights; None = kernels cannot read those of some weight, see `Weight.matrix`."""
    found = []
    for expert in experts:
        gate, up, down = expert.gate.weight.matrix, expert.up.weight.matrix, expert.down.weight.matrix
        if gate is None or up is None or down is None:
            return None
        found.append(ExpertWeights(gate, up, down, expert.gate.bias, expert.up.bias, expert.down.bias))
    return found


Pieces = Iterable[Mapping[str, torch.Tensor]]
"""For each of a weight's `pieces` (groups of its rows), the tensors that its format needs, by name; read one by one."""


class PackedForm(Protocol):
    """Layout of weights of one format in a packed file, in the order in which this machine's kernels read them."""

    @property
    def layout(self) -> str:
        """Name and version of the layout; it is part of the file's name."""
        ...

    def refusal(self, weight: TensorSpec, dtype: str) -> str | None:
        """Reason why the weight cannot be packed for a model of that dtype, such as "bfloat16"; None = it can."""
        ...

    def stored(self, weight: TensorSpec) -> tuple[TensorSpec, ...]:
        """Specs of the tensors in the file, with names that no other weight uses."""
        ...

    def pack(self, weight: TensorSpec, pieces: Pieces) -> Iterator[torch.Tensor]:
        """The bytes of the tensors of `stored`, concatenated, as tensors of any size."""
        ...

    def load(self, weight: TensorSpec, parts: Mapping[str, torch.Tensor]) -> Weight:
        """The weight that reads the tensors of `stored` in place, with the same bits as one loaded by the format."""
        ...


class WeightFormat(Protocol):
    """Format in which a checkpoint stores the weights of linear maps."""

    @property
    def name(self) -> str:
        """Name in fingerprints and messages."""
        ...

    @property
    def packed(self) -> PackedForm | None:
        """Form in packed files; None = weights are used as they are in the checkpoint."""
        ...

    def refusal(self, weight: TensorSpec) -> str | None:
        """Reason why the weight is not, or cannot be, stored in this format; None = it is stored so."""
        ...

    def has_table(self, table: TensorSpec) -> bool:
        """Whether an embedding is stored in this format; its rows are then decoded from a weight."""
        ...

    def check_model(self, weights: Sequence[TensorSpec], others: Collection[str]) -> None:
        """Checks, once, the parts of the configuration that concern the model as a whole.

        Args:
            weights: all weights of the model.
            others: modules of the checkpoint that do not belong to the model, by the checkpoint's names.

        Raises:
            UnsupportedCheckpointError: the configuration changes modules that do not exist.
        """
        ...

    def ignores(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether a stored tensor that is not needed has no effect on weights of the format, as activation ranges."""
        ...

    def checkpoint_tensors(self, weight: TensorSpec) -> tuple[TensorSpec, ...]:
        """Specs of the checkpoint's tensors from which the weight is made: codes, scales and the like."""
        ...

    def pieces(self, weight: TensorSpec) -> tuple[TensorSpec, ...]:
        """The weight, or parts of its rows that are loaded one after another, so that little more than the weight
        itself is in memory. Each has the weight's name.
        """
        ...

    def memory_tensors(self, weight: TensorSpec) -> tuple[TensorSpec, ...]:
        """Specs of the tensors that a loaded weight has in memory, to count their bytes."""
        ...

    def products(self, weight: TensorSpec) -> Products:
        """Arithmetic of the products with a loaded weight."""
        ...

    def load(self, weight: TensorSpec, pieces: Pieces) -> Weight:
        """The weight from the tensors of its pieces, on the device that computes.

        Raises:
            CheckpointError: numbers in them are impossible.
        """
        ...
