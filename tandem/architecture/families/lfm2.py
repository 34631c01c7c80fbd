"""Lfm2ForCausalLM: reads LFM2's `config.json` into a `ModelSpec`: short convolutions, attention in a few layers."""

from dataclasses import replace
from typing import Final

from tandem.architecture.families import base
from tandem.architecture.families.experts import mixtral_gated
from tandem.architecture.families.lfm2_mixers import read_mixers
from tandem.architecture.feed_forward import FeedForwardSpec
from tandem.architecture.fields import Fields
from tandem.architecture.mixers import MixerSpec
from tandem.architecture.model import LayerSpec, ModelSpec

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
)  # configuration keys that change nothing here


def read_sizes(fields: Fields, defaults: base.Defaults) -> base.Sizes:
    """Sizes, with the norms' epsilon read from this family's key."""
    return replace(base.read_sizes(fields, defaults), eps=fields.number("norm_eps", 1e-5, high=1.0))


def layer(sizes: base.Sizes, index: int, mixer: MixerSpec, block: FeedForwardSpec) -> LayerSpec:
    """A layer of this mixer and block, each after a norm with this family's name."""
    prefix = base.layer_prefix(index)
    return LayerSpec(
        mixer=mixer,
        feed_forward=block,
        before_mixer=sizes.norm(f"{prefix}.operator_norm"),
        before_feed_forward=sizes.norm(f"{prefix}.ffn_norm"),
    )


def finish(fields: Fields, sizes: base.Sizes, model: ModelSpec) -> ModelSpec:
    """The model with this family's name of the final norm, and its key for tying embedding and head."""
    tied = fields.flag("tie_embedding", model.tie_word_embeddings)
    return replace(model, final_norm=sizes.norm("model.embedding_norm"), tie_word_embeddings=tied)


def _read_model(fields: Fields) -> ModelSpec:
    sizes = read_sizes(fields, DEFAULTS)
    width = _read_width(fields, sizes)
    layers = [
        layer(sizes, index, mixer, mixtral_gated(sizes, f"{base.layer_prefix(index)}.feed_forward", width))
        for index, mixer in enumerate(read_mixers(fields, sizes))
    ]
    model = finish(fields, sizes, base.build_model("lfm2", fields, sizes, layers))
    base.check_unread(fields, UNUSED_KEYS)
    return model


def _read_width(fields: Fields, sizes: base.Sizes) -> int:
    """Inner size of a gated block: two thirds of the configured size, times a factor, rounded up to a multiple."""
    width = fields.count("block_ff_dim", sizes.intermediate, high=1 << 20)
    multiple = fields.count("block_multiple_of", 256, high=1 << 16)
    factor = fields.optional_number("block_ffn_dim_multiplier")
    if not fields.flag("block_auto_adjust_ff_dim", True):
        return width
    width = int(2 * width / 3)
    if factor is None and fields.has("block_ffn_dim_multiplier"):
        return width
    return multiple * -(-int((factor or 1.0) * width) // multiple)


FAMILY = base.Family(_read_model)  # found by `registry`
