"""Specs of draft heads: small networks that guess further tokens from a model's hidden states, for speculative
decoding.

Each row of a head's input belongs to a position of the text. It takes the model's hidden states at that position and
the token after it, and guesses the token after that. For the next guess, the head's own output takes the place of the
model's states.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tandem.architecture.feed_forward import GatedSpec
from tandem.architecture.mixers import AttentionSpec
from tandem.architecture.model import LayerSpec, ModelSpec
from tandem.architecture.tensors import LinearSpec, NormSpec, TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpSpec:
    """Multi-token prediction module, stored in a checkpoint as a further layer (DeepSeek-V3, arXiv:2412.19437, section
    2.2). Embedding and output head are the model's.

    The layer's input is `projection` of [embedding_norm(embedding of the token) | hidden_norm(hidden states)], where
    the model's hidden states are those after its final norm. The output of `final_norm` is the input of the output
    head, and of the next guess.
    """

    embedding_norm: NormSpec
    hidden_norm: NormSpec
    projection: LinearSpec
    layer: LayerSpec
    final_norm: NormSpec

    def tensors(self) -> Iterator[TensorSpec]:
        for norm in (self.embedding_norm, self.hidden_norm, self.final_norm):
            yield from norm.tensors()
        yield from self.projection.tensors()
        yield from self.layer.tensors()


def mtp_of(model: ModelSpec) -> MtpSpec | None:
    """Spec of the prediction module made of the model's first layer in `mtp_layers`; None = the model has no such
    module that is served.
    """
    names = model.mtp_names
    if not model.mtp_layers or names is None:
        return None
    return MtpSpec(
        embedding_norm=replace(model.final_norm, name=names.embedding_norm),
        hidden_norm=replace(model.final_norm, name=names.hidden_norm),
        projection=LinearSpec(names.projection, model.hidden_size, 2 * model.hidden_size),
        layer=model.mtp_layers[0],
        final_norm=replace(model.final_norm, name=names.final_norm),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Spec:
    """EAGLE-3 head in the published layout (arXiv:2503.01840).

    `fusion` makes one hidden state of the inputs of three of the model's layers. Attention reads
    [embedding_norm(embedding of the token) | hidden_norm(hidden state)], twice as wide as the hidden state, to which
    its output is added.

    Args:
        layers_read: indices of the model's layers whose inputs are taken.
        hidden_size: of the head.
        vocab_size: of the model.
        embedding: the head's own; None = the model's.
        head: map to logits of the head's tokens, of which there may be fewer than the model has.
        offsets: [number of the head's tokens], id of the token in the model minus its id in the head; None = equal ids.
        adds_to_normed: the output of attention is added to the hidden state after its norm, not before.
    """

    layers_read: tuple[int, ...]
    hidden_size: int
    vocab_size: int
    dtype: str
    embedding: TensorSpec | None
    fusion: LinearSpec
    embedding_norm: NormSpec
    hidden_norm: NormSpec
    attention: AttentionSpec
    feed_forward_norm: NormSpec
    feed_forward: GatedSpec
    final_norm: NormSpec
    head: LinearSpec
    offsets: TensorSpec | None
    adds_to_normed: bool

    def tensors(self) -> Iterator[TensorSpec]:
        if self.embedding is not None:
            yield self.embedding
        for norm in (self.embedding_norm, self.hidden_norm, self.feed_forward_norm, self.final_norm):
            yield from norm.tensors()
        for linear in (self.fusion, self.head):
            yield from linear.tensors()
        yield from self.attention.tensors()
        yield from self.feed_forward.tensors()
        if self.offsets is not None:
            yield self.offsets
