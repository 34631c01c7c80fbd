"""Hybrids of gated DeltaNet layers and gated attention (Qwen3-Next, Qwen3.5), most often three to one."""

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from tandem.architecture.families import base
from tandem.architecture.families.delta_net import DeltaNetMaps, DeltaNetSizes, read_delta_net
from tandem.architecture.fields import Fields
from tandem.architecture.mixers import AttentionSpec, MixerSpec
from tandem.architecture.rope import RopeSpec

LINEAR: Final = "linear_attention"
MTP: Final = ("mtp.",)  # prefix of the tensors of layers that predict further tokens


def read_mixers(
    fields: Fields, sizes: base.Sizes, rope: RopeSpec, maps_of: Callable[[DeltaNetSizes, str], DeltaNetMaps]
) -> list[MixerSpec]:
    """The mixer of each layer. `maps_of`: of a recurrent layer, whose tensors are under the prefix given."""
    fields.only("hidden_act", ("silu", "swish"), "silu")
    fields.only("number_of_conv_states", (1,), "1")
    fields.only("use_sliding_window", (False,), "false")
    delta, bias = read_delta_net(fields, sizes), fields.flag("attention_bias", False)

    def mixer(index: int, kind: str) -> MixerSpec:
        if kind == base.FULL:
            return _gated_attention(
                base.attention(sizes, index, rope, qkv_bias=bias, output_bias=bias, head_norms=True)
            )
        prefix = f"{base.layer_prefix(index)}.linear_attn"
        return delta.mixer(prefix, maps_of(delta, prefix))

    return [mixer(index, kind) for index, kind in enumerate(_read_kinds(fields, sizes.num_layers))]


def _read_kinds(fields: Fields, num_layers: int) -> tuple[str, ...]:
    """The kind of each layer, by `layer_types`, or by `full_attention_interval` in older files."""
    interval = fields.count("full_attention_interval", 4)
    types = base.read_layer_types(fields, num_layers, (base.FULL, LINEAR))
    if types is None:
        return tuple(LINEAR if (index + 1) % interval else base.FULL for index in range(num_layers))
    return types


def _gated_attention(plain: AttentionSpec) -> AttentionSpec:
    """The same with a gate behind each head's query."""
    return replace(plain, q=replace(plain.q, outputs=2 * plain.q.outputs), is_gated=True)
