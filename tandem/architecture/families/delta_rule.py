"""Hybrids of gated DeltaNet layers and gated attention (Qwen3-Next, Qwen3.5), most often three to one."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from tandem.architecture.families import base
from tandem.architecture.fields import Fields
from tandem.architecture.mixers import AttentionSpec, MixerSpec
from tandem.architecture.recurrent_mixers import Gating, LinearRecurrenceSpec, conv_spec
from tandem.architecture.rope import RopeSpec
from tandem.architecture.tensors import LinearSpec, NormSpec, ShardAxis, TensorSpec

LINEAR: Final = "linear_attention"
MTP: Final = ("mtp.",)  # prefix of the tensors of layers that predict further tokens
_MOST = 1 << 12


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNetSizes:
    """Sizes in elements; each of `num_groups` queries and keys serves consecutive ones of `num_heads` values."""

    hidden: int
    num_heads: int
    num_groups: int
    key_dim: int
    value_dim: int
    taps: int
    eps: float

    @property
    def channels(self) -> int:
        return 2 * self.num_groups * self.key_dim + self.num_heads * self.value_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNetMaps:
    """The maps in, as `LinearRecurrenceSpec` has them."""

    qkv: tuple[LinearSpec, ...]
    gate: LinearSpec
    a: LinearSpec
    b: LinearSpec


def read_mixers(
    fields: Fields, sizes: base.Sizes, rope: RopeSpec, maps_of: Callable[[DeltaNetSizes, str], DeltaNetMaps]
) -> list[MixerSpec]:
    """The mixer of each layer. `maps_of`: of a recurrent layer, whose tensors are under the prefix given."""
    fields.only("hidden_act", ("silu", "swish"), "silu")
    fields.only("number_of_conv_states", (1,), "1")
    fields.only("use_sliding_window", (False,), "false")
    delta, bias = _read_sizes(fields, sizes), fields.flag("attention_bias", False)

    def mixer(index: int, kind: str) -> MixerSpec:
        if kind == base.FULL:
            return _gated_attention(
                base.attention(sizes, index, rope, qkv_bias=bias, output_bias=bias, head_norms=True)
            )
        prefix = f"{base.layer_prefix(index)}.linear_attn"
        return _delta_net(delta, prefix, maps_of(delta, prefix))

    return [mixer(index, kind) for index, kind in enumerate(_read_kinds(fields, sizes.num_layers))]


def _read_kinds(fields: Fields, num_layers: int) -> tuple[str, ...]:
    """The kind of each layer, by `layer_types`, or by `full_attention_interval` in older files."""
    interval = fields.count("full_attention_interval", 4)
    types = base.read_layer_types(fields, num_layers, (base.FULL, LINEAR))
    if types is None:
        return tuple(LINEAR if (index + 1) % interval else base.FULL for index in range(num_layers))
    return types


def _read_sizes(fields: Fields, sizes: base.Sizes) -> DeltaNetSizes:
    heads = fields.count("linear_num_value_heads", 32, high=_MOST)
    groups = fields.count("linear_num_key_heads", 16, high=_MOST)
    if heads % groups:
        raise fields.wrong("linear_num_key_heads", f"a divisor of linear_num_value_heads={heads}")
    return DeltaNetSizes(
        hidden=sizes.hidden,
        num_heads=heads,
        num_groups=groups,
        key_dim=fields.count("linear_key_head_dim", 128, high=_MOST),
        value_dim=fields.count("linear_value_head_dim", 128, high=_MOST),
        taps=fields.count("linear_conv_kernel_dim", 4, low=2, high=64),
        eps=sizes.eps,
    )


def _gated_attention(plain: AttentionSpec) -> AttentionSpec:
    """The same with a gate behind each head's query."""
    return replace(plain, q=replace(plain.q, outputs=2 * plain.q.outputs), is_gated=True)


def _delta_net(sizes: DeltaNetSizes, prefix: str, maps: DeltaNetMaps) -> LinearRecurrenceSpec:
    """NOTE: the norm of the output is times its weight, those of layers times one more than theirs."""
    return LinearRecurrenceSpec(
        qkv=maps.qkv,
        gate=maps.gate,
        a=maps.a,
        b=maps.b,
        conv=conv_spec(f"{prefix}.conv1d", sizes.channels, sizes.taps, bias=False),
        conv_order="qkv",
        a_log=TensorSpec(f"{prefix}.A_log", (sizes.num_heads,), is_float32=True),
        a_bias=TensorSpec(f"{prefix}.dt_bias", (sizes.num_heads,), is_float32=True),
        skip=None,
        out_norm=NormSpec(f"{prefix}.norm", sizes.value_dim, sizes.eps),
        out=LinearSpec(f"{prefix}.out_proj", sizes.hidden, sizes.num_heads * sizes.value_dim, axis=ShardAxis.ROW),
        num_heads=sizes.num_heads,
        num_groups=sizes.num_groups,
        key_dim=sizes.key_dim,
        value_dim=sizes.value_dim,
        is_delta=True,
        are_normed=True,
        gating=Gating.NORM_THEN_GATE,
    )
