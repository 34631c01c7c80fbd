"""Lfm2ForCausalLM: LFM2. Short convolutions with gates, and attention in a few layers."""

from dataclasses import replace
from typing import Final

from tandem.architecture.families import base
from tandem.architecture.feed_forward import FeedForwardSpec, GatedSpec
from tandem.architecture.fields import Fields
from tandem.architecture.mixers import AttentionSpec, MixerSpec
from tandem.architecture.model import LayerSpec, ModelSpec
from tandem.architecture.recurrent_mixers import ShortConvSpec, conv_spec
from tandem.architecture.rope import RopeSpec
from tandem.architecture.tensors import LinearSpec, ShardAxis

DEFAULTS: Final = base.Defaults(
    max_positions=128_000,
    eos_token_id=2,
    bos_token_id=1,
    tied=True,
    theta=1_000_000.0,
    hidden=2560,
    intermediate=12_288,
    layers=32,
    heads=32,
    kv_heads=8,
    vocab=65_536,
)
UNUSED_KEYS: Final = (
    *("block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale", "block_use_swiglu"),
    *("block_use_xavier_init", "conv_dim", "conv_dim_out", "conv_use_xavier_init", "num_heads", "use_pos_enc", "theta"),
)
_CONV = "conv"


def read_sizes(fields: Fields, defaults: base.Defaults) -> base.Sizes:
    """Sizes, with the norms' epsilon under this family's name."""
    return replace(base.read_sizes(fields, defaults), eps=fields.number("norm_eps", 1e-5, high=1.0))


def read_mixers(fields: Fields, sizes: base.Sizes) -> list[MixerSpec]:
    """The mixer of each layer, by `layer_types`, or by `full_attn_idxs` in older files."""
    fields.only("number_of_conv_states", (1,), "1")
    types = base.read_layer_types(fields, sizes.num_layers, (base.FULL, _CONV))
    attending = fields.get("full_attn_idxs")
    if types is None:
        known = attending if isinstance(attending, list) else range(sizes.num_layers)
        types = tuple(base.FULL if index in known else _CONV for index in range(sizes.num_layers))
    taps, bias, rope = (
        fields.count("conv_L_cache", 3, low=2, high=64),
        fields.flag("conv_bias", False),
        sizes.rope(fields),
    )
    return [
        _attention(sizes, index, rope) if kind == base.FULL else _convolution(sizes, index, taps, bias=bias)
        for index, kind in enumerate(types)
    ]


def layer(sizes: base.Sizes, index: int, mixer: MixerSpec, block: FeedForwardSpec) -> LayerSpec:
    """A mixer and a block behind the norms that this family has."""
    prefix = base.layer_prefix(index)
    return LayerSpec(
        mixer=mixer,
        feed_forward=block,
        before_mixer=sizes.norm(f"{prefix}.operator_norm"),
        before_feed_forward=sizes.norm(f"{prefix}.ffn_norm"),
    )


def gated(sizes: base.Sizes, prefix: str, width: int) -> GatedSpec:
    """A gated block with the tensors w1 (gate), w3 (up) and w2 (down)."""
    return GatedSpec(
        gate=LinearSpec(f"{prefix}.w1", width, sizes.hidden),
        up=LinearSpec(f"{prefix}.w3", width, sizes.hidden),
        down=LinearSpec(f"{prefix}.w2", sizes.hidden, width, axis=ShardAxis.ROW),
        activation=sizes.activation,
    )


def finish(fields: Fields, sizes: base.Sizes, model: ModelSpec) -> ModelSpec:
    """The model with its last norm and its tie under this family's names."""
    tied = fields.flag("tie_embedding", model.tie_word_embeddings)
    return replace(model, final_norm=sizes.norm("model.embedding_norm"), tie_word_embeddings=tied)


def _attention(sizes: base.Sizes, index: int, rope: RopeSpec) -> AttentionSpec:
    prefix, plain = f"{base.layer_prefix(index)}.self_attn", base.attention(sizes, index, rope)
    return replace(
        plain,
        o=replace(plain.o, name=f"{prefix}.out_proj"),
        q_norm=sizes.norm(f"{prefix}.q_layernorm", sizes.head_dim),
        k_norm=sizes.norm(f"{prefix}.k_layernorm", sizes.head_dim),
    )


def _convolution(sizes: base.Sizes, index: int, taps: int, *, bias: bool) -> ShortConvSpec:
    prefix, hidden = f"{base.layer_prefix(index)}.conv", sizes.hidden
    return ShortConvSpec(
        project=LinearSpec(f"{prefix}.in_proj", 3 * hidden, hidden, bias),
        conv=conv_spec(f"{prefix}.conv", hidden, taps, bias=bias, activation=False),
        out=LinearSpec(f"{prefix}.out_proj", hidden, hidden, bias, ShardAxis.ROW),
    )


def _read_model(fields: Fields) -> ModelSpec:
    sizes = read_sizes(fields, DEFAULTS)
    width = _read_width(fields, sizes)
    layers = [
        layer(sizes, index, mixer, gated(sizes, f"{base.layer_prefix(index)}.feed_forward", width))
        for index, mixer in enumerate(read_mixers(fields, sizes))
    ]
    model = finish(fields, sizes, base.build_model("lfm2", fields, sizes, layers))
    base.check_unread(fields, UNUSED_KEYS)
    return model


def _read_width(fields: Fields, sizes: base.Sizes) -> int:
    """Inner elements of a gated block: two thirds of what is written, times a factor, rounded up to a multiple."""
    width = fields.count("block_ff_dim", sizes.intermediate, high=1 << 20)
    multiple = fields.count("block_multiple_of", 256, high=1 << 16)
    factor = fields.optional_number("block_ffn_dim_multiplier")
    if not fields.flag("block_auto_adjust_ff_dim", True):
        return width
    width = int(2 * width / 3)
    if factor is None and fields.has("block_ffn_dim_multiplier"):
        return width
    return multiple * -(-int((factor or 1.0) * width) // multiple)


FAMILY = base.Family(_read_model)
