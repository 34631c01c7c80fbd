"""Reads sparse latent attention (DSA) with the keys and tensor names of DeepSeek-V3.2: the layers with an indexer,
which scores tokens for each query, and its sizes.
"""

from collections.abc import Callable, Sequence

from tandem.architecture.families import base
from tandem.architecture.families.grouped_experts import RoutingDefaults, build_model, read_dense
from tandem.architecture.fields import Fields
from tandem.architecture.mixers import LatentAttentionSpec
from tandem.architecture.model import ModelSpec
from tandem.architecture.sparse_mixers import IndexerSpec, SparseLatentAttentionSpec
from tandem.architecture.tensors import LayerNormSpec, LinearSpec, ShardAxis

_NORM_EPS = 1e-6
_MULTIPLE = 8  # an index key has a multiple of so many elements
INDEXED = "indexed_attention"  # kind of a layer, in `layer_types`
_OLD_INDEXED = "deepseek_sparse_attention"  # the same in files of earlier transformers
FULL, SHARED = "full", "shared"  # in `indexer_types`: has an indexer, or follows an earlier one


def read_indexers(
    fields: Fields, sizes: base.Sizes, *, num_heads: int, is_interleaved: bool, types: Sequence[str] | None = None
) -> Callable[[int, LatentAttentionSpec], SparseLatentAttentionSpec]:
    """Reads the indexers. Returns a function that turns the attention of the layer with a given index into a sparse
    one.

    Args:
        num_heads: index heads if the file does not say.
        is_interleaved: order of the rotated elements of index queries and keys.
        types: for each layer, `FULL` if it has an indexer; None = all have one.
    """
    base.read_layer_types(fields, sizes.num_layers, (INDEXED, _OLD_INDEXED))
    heads = fields.count("index_n_heads", num_heads, high=1 << 12)
    head_dim = fields.count("index_head_dim", 128, high=1 << 12)
    top_k = fields.count("index_topk", 2048)

    def layer(index: int, attention: LatentAttentionSpec) -> SparseLatentAttentionSpec:
        if head_dim % _MULTIPLE or head_dim < attention.rotary_dim:
            told = f"a multiple of {_MULTIPLE}, at least the qk_rope_head_dim={attention.rotary_dim} that are rotated"
            raise fields.wrong("index_head_dim", told)
        if attention.q_a is None:
            raise fields.wrong("q_lora_rank", "given: index queries are made of the latent of queries")
        chooser = next(other for other in range(index, -1, -1) if types is None or types[other] == FULL)
        name = f"{base.layer_prefix(chooser)}.self_attn.indexer"
        indexer = IndexerSpec(
            name=name,
            q=LinearSpec(f"{name}.wq_b", heads * head_dim, attention.q_a.outputs, axis=ShardAxis.REPLICATED),
            k=LinearSpec(f"{name}.wk", head_dim, sizes.hidden, axis=ShardAxis.REPLICATED),
            k_norm=LayerNormSpec(f"{name}.k_norm", head_dim, _NORM_EPS),
            weights=LinearSpec(f"{name}.weights_proj", heads, sizes.hidden, axis=ShardAxis.REPLICATED, is_float32=True),
            num_heads=heads,
            head_dim=head_dim,
            is_interleaved=is_interleaved,
        )
        return SparseLatentAttentionSpec.of(
            attention, top_k=top_k, chosen_by=name, indexer=indexer if chooser == index else None
        )

    return layer


def read_indexer_types(fields: Fields, num_layers: int) -> Sequence[str]:
    """For each layer, `FULL` if it chooses tokens, or `SHARED` if it reuses the choice of the last layer that did."""
    named = fields.texts("indexer_types")
    types = _types_of_pattern(fields, num_layers) if named is None else named
    if not {*types} <= {FULL, SHARED}:
        raise fields.wrong("indexer_types", f"a list of {FULL} and {SHARED}")
    if types[0] != FULL:
        raise fields.wrong("indexer_types", f"{FULL} in the first layer, which has none before it")
    return types


def _types_of_pattern(fields: Fields, num_layers: int) -> Sequence[str]:
    """Types from `index_topk_pattern`, or from a period. NOTE: the pattern wins, as in transformers."""
    pattern = fields.text("index_topk_pattern")
    period = fields.optional_count("index_topk_freq", 1, low=0) or 1
    offset = fields.count("index_skip_topk_offset", 2, low=0)
    if pattern is None:
        return [FULL if max(index - offset + 1, 0) % period == 0 else SHARED for index in range(num_layers)]
    if len(pattern) != num_layers or not {*pattern} <= {"F", "S"}:
        raise fields.wrong("index_topk_pattern", f"num_hidden_layers={num_layers} letters, F or S")
    return [FULL if letter == "F" else SHARED for letter in pattern]


def build_sparse_model(
    family: str,
    fields: Fields,
    sizes: base.Sizes,
    attention: Callable[[int], LatentAttentionSpec],
    sparse: Callable[[int, LatentAttentionSpec], SparseLatentAttentionSpec],
    routing: RoutingDefaults,
) -> ModelSpec:
    """The model with the attention of each layer, made sparse by `sparse`. Layers without experts may be listed."""
    dense = read_dense(fields, sizes.num_layers, fields.count("first_k_dense_replace", routing.num_dense, low=0))
    return build_model(
        family,
        fields,
        sizes,
        lambda index: sparse(index, attention(index)),
        routing,
        dense=dense,
        serves_mtp=False,
    )
