"""The seam between layers and the formats of their weights: a `WeightFormat` makes a `Weight`, which layers call.

A format says which tensors of a checkpoint a weight is made of and, in its packed form, what is kept of it in a file
that all processes of a machine map. Layers and decoder call weights and know no format.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from tandem.architecture.feed_forward import Activation, Clamp
from tandem.architecture.tensors import TensorSpec
from tandem.compute.ops import Experts, ExpertWeights, Numbers


class Weight(Protocol):
    """The numbers of a linear map, [out, in], and products with them. Row-wise."""

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def dtype(self) -> torch.dtype | None:
        """Dtype of the rows that it multiplies; None = any float dtype."""
        ...

    @property
    def num_bytes(self) -> int:
        """In memory, of codes, scales and whatever else belongs to them."""
        ...

    @property
    def matrix(self) -> Numbers | None:
        """The numbers as calls of the kernels that fuse several products read them; None = those calls do not."""
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
        """`activation(x @ weight.T + bias) * up(x)`, [num_tokens, out]; None = the two have no call that does it."""
        ...

    def grouped(
        self, experts: "Sequence[ExpertLinears]", activation: Activation, clamp: Clamp | None
    ) -> Experts | None:
        """A layer's experts, this weight the gate of the first, in one call; None = there is none for such experts."""
        ...


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Dtype and shape of one tensor, from the header of a checkpoint. `name`: there."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    name: str


Choice = Callable[[TensorSpec], str | None]
"""Why a weight has not a format; None = it has."""

StoredTensors = Mapping[str, StoredTensor]
"""By the names that specs have for a checkpoint's tensors (`Source.tensor`)."""


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
        """`activation(self(x)) * up(x)`, [num_tokens, out]; None = there is no call that does it."""
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
    """Their numbers; None = a weight keeps its own to itself."""
    found = []
    for expert in experts:
        gate, up, down = expert.gate.weight.matrix, expert.up.weight.matrix, expert.down.weight.matrix
        if gate is None or up is None or down is None:
            return None
        found.append(ExpertWeights(gate, up, down, expert.gate.bias, expert.up.bias, expert.down.bias))
    return found


Pieces = Iterable[Mapping[str, torch.Tensor]]
"""Of each of a weight's `pieces`, the tensors that its format wants, by name; read when it is their turn."""


class PackedForm(Protocol):
    """Layout of weights of one format in a packed file, in the order in which this machine's kernels read them."""

    @property
    def layout(self) -> str:
        """Name and version of that order; another one makes another file."""
        ...

    def refusal(self, weight: TensorSpec, dtype: str) -> str | None:
        """Reason why the weight cannot be packed for a model of that dtype, "bfloat16" for example; None = it can."""
        ...

    def stored(self, weight: TensorSpec) -> tuple[TensorSpec, ...]:
        """The tensors in the file, by names that no other weight has."""
        ...

    def pack(self, weight: TensorSpec, pieces: Pieces) -> Iterator[torch.Tensor]:
        """The bytes of the tensors of `stored`, one after the other, in tensors of any size."""
        ...

    def load(self, weight: TensorSpec, parts: Mapping[str, torch.Tensor]) -> Weight:
        """The weight over the tensors of `stored`, which stay where they are. It has the bits of the format's own."""
        ...


class WeightFormat(Protocol):
    """Format in which a checkpoint stores the weights of linear maps."""

    @property
    def name(self) -> str:
        """In fingerprints and messages."""
        ...

    @property
    def packed(self) -> PackedForm | None:
        """None = weights are used as the checkpoint has them."""
        ...

    def refusal(self, weight: TensorSpec) -> str | None:
        """Reason why the weight is not, or cannot be, stored in this format; None = it is."""
        ...

    def has_table(self, table: TensorSpec) -> bool:
        """Whether an embedding is stored like this; its rows are then taken from the numbers of a weight."""
        ...

    def check_model(self, weights: Sequence[TensorSpec], others: Collection[str]) -> None:
        """Checks what the configuration says of a model as a whole, once.

        Args:
            weights: all that the model has.
            others: modules that the checkpoint has beside the model, by its names.

        Raises:
            UnsupportedCheckpointError: a change of modules of which there are none.
        """
        ...

    def ignores(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether a stored tensor that nothing wants has no effect on weights of the format, as ranges of activations
        have none.
        """
        ...

    def wants(self, weight: TensorSpec) -> tuple[TensorSpec, ...]:
        """The tensors of a checkpoint that the weight is made of: codes, scales and the like."""
        ...

    def pieces(self, weight: TensorSpec) -> tuple[TensorSpec, ...]:
        """The weight, or rows of it one after the other that are read one at a time: little more than the weight itself
        is then in memory. Each has the weight's name.
        """
        ...

    def keeps(self, weight: TensorSpec) -> tuple[TensorSpec, ...]:
        """The tensors that a loaded weight keeps in memory, to count their bytes."""
        ...

    def load(self, weight: TensorSpec, pieces: Pieces) -> Weight:
        """The weight of the tensors of its pieces, on the device that computes.

        Raises:
            CheckpointError: numbers in them are impossible.
        """
        ...
