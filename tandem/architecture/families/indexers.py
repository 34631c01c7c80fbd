"""Attention to chosen tokens (DSA) with the tensor names of DeepSeek-V3.2."""

from collections.abc import Callable

from tandem.architecture.families import base
from tandem.architecture.fields import Fields
from tandem.architecture.mixers import LatentAttentionSpec
from tandem.architecture.sparse_mixers import IndexerSpec, SparseLatentAttentionSpec
from tandem.architecture.tensors import LayerNormSpec, LinearSpec, ShardAxis

_NORM_EPS = 1e-6
_MULTIPLE = 8  # of numbers, in which keys are read
INDEXED = "indexed_attention"


def read_indexers(
    fields: Fields, sizes: base.Sizes, *, num_heads: int, is_interleaved: bool
) -> Callable[[int, LatentAttentionSpec], SparseLatentAttentionSpec]:
    """Reads how the layers choose what they attend to; returns what makes a layer's attention, by index, a sparse one.

    `num_heads`: of an absent key. `is_interleaved`: order of the rotated elements of index queries and keys.
    """
    types = fields.texts("layer_types")
    if types is not None and (len(types) != sizes.num_layers or set(types) != {INDEXED}):
        raise fields.unsupported("layer_types", f"a list of num_hidden_layers={sizes.num_layers} times {INDEXED}")
    heads = fields.count("index_n_heads", num_heads, high=1 << 12)
    head_dim = fields.count("index_head_dim", 128, high=1 << 12)
    top_k = fields.count("index_topk", 2048)

    def layer(index: int, attention: LatentAttentionSpec) -> SparseLatentAttentionSpec:
        if head_dim % _MULTIPLE or head_dim < attention.rotary_dim:
            told = f"a multiple of {_MULTIPLE}, at least the qk_rope_head_dim={attention.rotary_dim} that are rotated"
            raise fields.wrong("index_head_dim", told)
        if attention.q_a is None:
            raise fields.wrong("q_lora_rank", "given: index queries are made of the latent of queries")
        prefix = f"{base.layer_prefix(index)}.self_attn.indexer"
        indexer = IndexerSpec(
            q=LinearSpec(f"{prefix}.wq_b", heads * head_dim, attention.q_a.outputs, axis=ShardAxis.REPLICATED),
            k=LinearSpec(f"{prefix}.wk", head_dim, sizes.hidden, axis=ShardAxis.REPLICATED),
            k_norm=LayerNormSpec(f"{prefix}.k_norm", head_dim, _NORM_EPS),
            weights=LinearSpec(
                f"{prefix}.weights_proj", heads, sizes.hidden, axis=ShardAxis.REPLICATED, is_float32=True
            ),
            num_heads=heads,
            head_dim=head_dim,
            is_interleaved=is_interleaved,
        )
        return SparseLatentAttentionSpec.of(attention, top_k=top_k, indexer=indexer)

    return layer
