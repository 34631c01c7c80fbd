"""TandemNsaForCausalLM: Llama with Native Sparse Attention (arXiv:2502.11089) in every layer.

No checkpoint of it is published, and transformers has no such model: the names are Tandem's. Keys besides Llama's, with
the paper's values as defaults:

- `nsa_compress_length` 32, `nsa_compress_stride` 16: tokens of a compressed key, and from the start of one to the next;
- `nsa_compress_hidden`: inner elements of the compression, twice the size of a head if absent;
- `nsa_block_size` 64, `nsa_num_blocks` 16: blocks that a query chooses, including the `nsa_num_first` 1 first and the
  `nsa_num_last` 2 last ones;
- `nsa_window` 512: tokens of the sliding window.

Tensors besides Llama's, under `self_attn`: `compress_k` and `compress_v`, each with `position` [length, head_dim],
`up_proj.weight` [hidden, length * head_dim] and `down_proj.weight` [head_dim, hidden], shared by all heads; and
`gate_proj.weight` [3 * heads, hidden_size], whose rows are the gates of compressed keys, then of blocks, then of the
window. The three kinds of attention share K and V.
"""

from tandem.architecture.block_mixers import BlockChoice, CompressedAttentionSpec, CompressorSpec
from tandem.architecture.families import base
from tandem.architecture.fields import Fields
from tandem.architecture.model import ModelSpec
from tandem.architecture.tensors import LinearSpec, ShardAxis, TensorSpec

_DEFAULTS = base.Defaults(max_positions=131_072, eos_token_id=2, bos_token_id=1, eps=1e-5)


def _read_model(fields: Fields) -> ModelSpec:
    sizes = base.read_sizes(fields, _DEFAULTS)
    rope = sizes.rope(fields)
    length, stride = fields.count("nsa_compress_length", 32), fields.count("nsa_compress_stride", 16)
    if length % stride:
        raise fields.wrong("nsa_compress_length", f"a multiple of nsa_compress_stride={stride}")
    if sizes.head_dim % stride:
        raise fields.wrong("nsa_compress_stride", f"a divisor of head_dim={sizes.head_dim}")
    inner = fields.count("nsa_compress_hidden", 2 * sizes.head_dim)
    choice, window = _read_choice(fields, stride), fields.count("nsa_window", 512)

    def mixer(index: int) -> CompressedAttentionSpec:
        prefix = f"{base.layer_prefix(index)}.self_attn"
        return CompressedAttentionSpec(
            attention=base.attention(sizes, index, rope),
            choice=choice,
            keys=_compressor(f"{prefix}.compress_k", sizes.head_dim, length, inner),
            values=_compressor(f"{prefix}.compress_v", sizes.head_dim, length, inner),
            gates=LinearSpec(f"{prefix}.gate_proj", 3 * sizes.num_heads, sizes.hidden, axis=ShardAxis.REPLICATED),
            length=length,
            stride=stride,
            window=window,
        )

    layers = [base.pre_norm_layer(sizes, index, mixer(index)) for index in range(sizes.num_layers)]
    model = base.build_model("nsa", fields, sizes, layers)
    base.check_unread(fields)
    return model


def _read_choice(fields: Fields, stride: int) -> BlockChoice:
    size, top_k = fields.count("nsa_block_size", 64), fields.count("nsa_num_blocks", 16)
    if size % stride:
        raise fields.wrong("nsa_block_size", f"a multiple of nsa_compress_stride={stride}")
    first, last = fields.count("nsa_num_first", 1, low=0), fields.count("nsa_num_last", 2)
    if first + last > top_k:
        raise fields.wrong("nsa_num_blocks", f"at least the {first} first and {last} last that are always chosen")
    return BlockChoice(size, top_k, first, last)


def _compressor(prefix: str, head_dim: int, length: int, inner: int) -> CompressorSpec:
    return CompressorSpec(
        position=TensorSpec(f"{prefix}.position", (length, head_dim)),
        up=LinearSpec(f"{prefix}.up_proj", inner, length * head_dim, axis=ShardAxis.REPLICATED),
        down=LinearSpec(f"{prefix}.down_proj", head_dim, inner, axis=ShardAxis.REPLICATED),
    )


FAMILY = base.Family(_read_model)  # found by `registry`
