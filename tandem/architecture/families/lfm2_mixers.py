"""Reads the mixers of LFM2 and LFM2-MoE: short convolutions with gates, and attention with norms on heads."""

from dataclasses import replace
from typing import Final

from tandem.architecture.families import base
from tandem.architecture.fields import Fields
from tandem.architecture.mixers import AttentionSpec, MixerSpec
from tandem.architecture.recurrent_mixers import ShortConvSpec, conv_spec
from tandem.architecture.rope import RopeSpec
from tandem.architecture.tensors import LinearSpec, ShardAxis

_CONV: Final = "conv"


def read_mixers(fields: Fields, sizes: base.Sizes) -> list[MixerSpec]:
    """The mixer of each layer, by `layer_types`, or by `full_attn_idxs` in older files."""
    fields.only("number_of_conv_states", (1,), "1")
    fields.only("hidden_act", ("silu", "swish"), "silu")  # NOTE: of the blocks; transformers reads no key
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
