"""Reads the attention of DeepSeek-V4 into specs of `entry_mixers`: layers with a sliding window alone, and layers that
also attend to entries, vectors compressed from several tokens each.
"""

from tandem.architecture.entry_mixers import EntryAttentionSpec, EntryIndexerSpec, SharedRowAttentionSpec
from tandem.architecture.families import base
from tandem.architecture.families.compressed_kinds import CHOSEN, read_kinds, read_spans
from tandem.architecture.families.compressed_parts import group_maps, pool_of
from tandem.architecture.families.compressed_ropes import read_ropes
from tandem.architecture.fields import Fields
from tandem.architecture.tensors import LinearSpec, NormSpec, ShardAxis, TensorSpec

_COPIED = ShardAxis.REPLICATED


def read_mixers(fields: Fields, sizes: base.Sizes) -> list[SharedRowAttentionSpec]:
    """Reads the attention of each layer, in order."""
    if sizes.num_kv_heads != 1:
        raise fields.unsupported("num_key_value_heads", "1: a row is key and value of all heads")
    kinds, spans, ropes = read_kinds(fields, sizes.num_layers), read_spans(fields), read_ropes(fields, sizes)
    window, latent = fields.count("sliding_window", 128), fields.count("q_lora_rank", 1024)
    groups, group_size = fields.count("o_groups", 8), fields.count("o_lora_rank", 1024)
    if sizes.num_heads % groups:
        raise fields.wrong("o_groups", f"a divisor of num_attention_heads={sizes.num_heads}")
    index_heads, index_dim = fields.count("index_n_heads", 64), fields.count("index_head_dim", 128, low=2)
    top_k, rotary_dim = fields.count("index_topk", 512), ropes[CHOSEN].rotary_dim
    if index_dim % 2 or index_dim < rotary_dim:
        raise fields.wrong("index_head_dim", f"even, and at least the {rotary_dim} elements that are rotated")

    def attention(prefix: str, kind: str) -> SharedRowAttentionSpec:
        return SharedRowAttentionSpec(
            q_a=LinearSpec(f"{prefix}.q_a_proj", latent, sizes.hidden, axis=_COPIED),
            q_norm=sizes.norm(f"{prefix}.q_a_norm", latent),
            q=LinearSpec(f"{prefix}.q_b_proj", sizes.num_heads * sizes.head_dim, latent),
            head_norm=NormSpec(f"{prefix}.q_b_norm", sizes.head_dim, sizes.eps, weight=None),
            kv=LinearSpec(f"{prefix}.kv_proj", sizes.head_dim, sizes.hidden, axis=_COPIED),
            kv_norm=sizes.norm(f"{prefix}.kv_norm", sizes.head_dim),
            o_groups=tuple(group_maps(prefix, groups, group_size, sizes.num_heads * sizes.head_dim // groups)),
            o=LinearSpec(f"{prefix}.o_b_proj", sizes.hidden, groups * group_size, axis=ShardAxis.ROW),
            num_heads=sizes.num_heads,
            head_dim=sizes.head_dim,
            scale=sizes.head_dim**-0.5,
            rope=ropes[kind],
            window=window,
            sinks=TensorSpec(f"{prefix}.sinks", (sizes.num_heads,), is_float32=True),
        )

    def mixer(index: int, kind: str) -> SharedRowAttentionSpec:
        prefix = f"{base.layer_prefix(index)}.self_attn"
        if kind not in spans:
            return attention(prefix, kind)
        inner, indexer, series = f"{prefix}.compressor", None, 2 if kind == CHOSEN else 1
        if kind == CHOSEN:
            name = f"{inner}.indexer"
            indexer = EntryIndexerSpec(
                pool=pool_of(name, sizes, index_dim, spans[kind], series),
                q=LinearSpec(f"{name}.q_b_proj", index_heads * index_dim, latent, axis=_COPIED),
                weights=LinearSpec(
                    f"{name}.scorer.weights_proj", index_heads, sizes.hidden, axis=_COPIED, is_float32=True
                ),
                num_heads=index_heads,
                top_k=top_k,
            )
        pool = pool_of(inner, sizes, sizes.head_dim, spans[kind], series)
        return EntryAttentionSpec.of(attention(prefix, kind), pool=pool, indexer=indexer)

    return [mixer(index, kind) for index, kind in enumerate(kinds)]
