"""Reads the per-layer embeddings of Gemma 4: of each token, a row that each layer adds to the residual stream."""

from tandem.architecture.families import base
from tandem.architecture.fields import Fields
from tandem.architecture.per_layer_embedding import PerLayerEmbeddingSpec
from tandem.architecture.tensors import LinearSpec, NormSpec, ShardAxis, Source, TensorSpec

_MODEL_PROJECTION = "model.per_layer_model_projection"


def read_embeddings(fields: Fields, sizes: base.Sizes) -> list[PerLayerEmbeddingSpec | None]:
    """Reads the per-layer embedding of each layer; all share one table and one norm.

    NOTE: the model projection is divided by the root of its inputs before it is normed. That changes only the effect of
    the norm's epsilon.
    """
    size = fields.optional_count("hidden_size_per_layer_input", 256, low=0, high=1 << 14) or 0
    vocab = fields.count("vocab_size_per_layer_input", 262_144)
    if not size:
        return [None] * sizes.num_layers
    if vocab < sizes.vocab:
        raise fields.wrong("vocab_size_per_layer_input", f"at least vocab_size={sizes.vocab}")
    table = TensorSpec("model.embed_tokens_per_layer.weight", (vocab, sizes.num_layers * size), is_lookup=True)
    norm = NormSpec("model.per_layer_projection_norm", size, sizes.eps * sizes.hidden)

    def embedding(index: int) -> PerLayerEmbeddingSpec:
        prefix, start = base.layer_prefix(index), index * size
        rows = Source(f"{_MODEL_PROJECTION}.weight", start=start, stop=start + size)
        return PerLayerEmbeddingSpec(
            table=table,
            start=start,
            table_scale=size**0.5,
            context=LinearSpec(f"{_MODEL_PROJECTION}.{index}", size, sizes.hidden, weight_source=rows),
            context_norm=norm,
            scale=2**-0.5,
            gate=LinearSpec(f"{prefix}.per_layer_input_gate", size, sizes.hidden),
            project=LinearSpec(f"{prefix}.per_layer_projection", sizes.hidden, size, axis=ShardAxis.ROW),
            after=sizes.norm(f"{prefix}.post_per_layer_input_norm"),
            activation=sizes.activation,
        )

    return [embedding(index) for index in range(sizes.num_layers)]
