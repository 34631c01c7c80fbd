"""Per-layer embeddings: embeddings of the token that each layer adds, besides the model's input embedding."""

from collections.abc import Iterator
from dataclasses import dataclass

from tandem.architecture.feed_forward import Activation
from tandem.architecture.tensors import LinearSpec, NormSpec, TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class PerLayerEmbeddingSpec:
    """`after(project(activation(gate(x)) * e))` is added to the residual stream `x` (Gemma 3n, Gemma 4), where `e` is
    made of the layer's part of the token's row in `table` and of the input embedding.

    `e = (context_norm(context(h)) + table_scale * row) * scale`, where `h` is the embedding that the model begins with
    and `row` the elements from `start` on in the token's row of `table`.

    Args:
        table: [vocabulary, layers * size], of all layers.
        start: first element of the layer's part of a row.
        table_scale: rounded to the dtype.
        context_norm: the same tensor for all layers.
    """

    table: TensorSpec
    start: int
    table_scale: float
    context: LinearSpec
    context_norm: NormSpec
    scale: float
    gate: LinearSpec
    project: LinearSpec
    after: NormSpec
    activation: Activation

    @property
    def size(self) -> int:
        """Number of elements of `e`."""
        return self.gate.outputs

    def tensors(self) -> Iterator[TensorSpec]:
        yield self.table
        yield from self.active_tensors()

    def active_tensors(self) -> Iterator[TensorSpec]:
        """Tensors that one token is multiplied by."""
        for linear in (self.context, self.gate, self.project):
            yield from linear.tensors()
        for norm in (self.context_norm, self.after):
            yield from norm.tensors()
