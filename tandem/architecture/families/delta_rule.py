"""Reads parts shared by Qwen3-Next and Qwen3.5: the mixers, usually three gated DeltaNets (`delta_net`) to one gated
attention, and the layers for multi-token prediction.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

from tandem.architecture.families import base
from tandem.architecture.families.delta_net import DeltaNetMaps, DeltaNetSizes, read_delta_net
from tandem.architecture.feed_forward import MixtureOfExpertsSpec
from tandem.architecture.fields import Fields
from tandem.architecture.mixers import AttentionSpec, MixerSpec
from tandem.architecture.model import LayerSpec, ModelSpec, MtpNames
from tandem.architecture.renaming import renamed
from tandem.architecture.rope import RopeSpec

LINEAR: Final = "linear_attention"  # kind of a layer with a recurrence
_MTP_PREFIX = "mtp"  # prefix of the tensors of layers that predict further tokens
_MTP_NAMES = MtpNames("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm")
_NUM_MTP_KEYS = ("mtp_num_hidden_layers", "num_nextn_predict_layers")


def read_mixers(
    fields: Fields, sizes: base.Sizes, rope: RopeSpec, maps_of: Callable[[DeltaNetSizes, str], DeltaNetMaps]
) -> list[MixerSpec]:
    """The mixer of each layer. `maps_of` describes a recurrent layer's projections, given its sizes and prefix."""
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


def build_model_with_mtp(family: str, fields: Fields, sizes: base.Sizes, layers: Sequence[LayerSpec]) -> ModelSpec:
    """Builds the model of `layers`, with its layers for multi-token prediction, if it has any."""
    mtp_layers = _read_mtp_layers(fields, layers)
    names = _MTP_NAMES if mtp_layers else None
    unserved = (f"{_MTP_PREFIX}.",)
    return base.build_model(family, fields, sizes, layers, unserved=unserved, mtp_layers=mtp_layers, mtp_names=names)


def _read_mtp_layers(fields: Fields, layers: Sequence[LayerSpec]) -> tuple[LayerSpec, ...]:
    """Reads the layers for multi-token prediction, built like the model's attention layers, with experts if the model
    has any. Empty if these layers have their own embedding, or if no layer of the model has attention.
    """
    num_mtp_layers = max(fields.count(name, 1, low=0) for name in _NUM_MTP_KEYS)
    own_embedding = fields.flag("mtp_use_dedicated_embeddings", False)
    with_attention = [index for index, layer in enumerate(layers) if isinstance(layer.mixer, AttentionSpec)]
    with_experts = [i for i, layer in enumerate(layers) if isinstance(layer.feed_forward, MixtureOfExpertsSpec)]
    if own_embedding or not with_attention:
        return ()
    attention = with_attention[0]
    block = with_experts[0] if with_experts else attention

    def mtp_layer(index: int) -> LayerSpec:
        own = f"{_MTP_PREFIX}.layers.{index}."
        feed_forward = renamed(layers[block].feed_forward, f"{base.layer_prefix(block)}.", own)
        like = replace(layers[attention], feed_forward=None)
        return replace(renamed(like, f"{base.layer_prefix(attention)}.", own), feed_forward=feed_forward)

    return tuple(map(mtp_layer, range(num_mtp_layers)))


def _read_kinds(fields: Fields, num_layers: int) -> tuple[str, ...]:
    """The kind of each layer, by `layer_types`, or by `full_attention_interval` in older files."""
    interval = fields.count("full_attention_interval", 4)
    types = base.read_layer_types(fields, num_layers, (base.FULL, LINEAR))
    if types is None:
        return tuple(LINEAR if (index + 1) % interval else base.FULL for index in range(num_layers))
    return types


def _gated_attention(plain: AttentionSpec) -> AttentionSpec:
    """Adds a gate to each head: `q` also computes the gates, each after its head's query."""
    return replace(plain, q=replace(plain.q, outputs=2 * plain.q.outputs), is_gated=True)
