"""Reads Kimi delta attention (arXiv:2510.26692), a recurrence that decays each column of its state separately."""

from collections.abc import Callable

from tandem.architecture.families import base
from tandem.architecture.families.delta_rule import LINEAR
from tandem.architecture.fields import Fields
from tandem.architecture.recurrent_mixers import ConvSpec, Gating, LinearRecurrenceSpec
from tandem.architecture.tensors import LinearSpec, NormSpec, ShardAxis, TensorSpec

_MAX_SIZE = 1 << 12  # largest accepted in a file


def read_delta_attention(fields: Fields, sizes: base.Sizes) -> Callable[[int], LinearRecurrenceSpec]:
    """Returns a function from a layer's index to its mixer. Sizes in `linear_attn_config` win over those outside it."""
    fields.only("hidden_act", ("silu", "swish"), "silu")
    fields.only("number_of_conv_states", (1,), "1")
    dim = _read_size(fields, "linear_head_dim", "head_dim", 128)
    heads = _read_size(fields, "linear_num_heads", "num_heads", 32)
    taps = _read_size(fields, "linear_conv_kernel_dim", "short_conv_kernel_size", 4)
    if taps < 2:
        raise fields.wrong("linear_conv_kernel_dim", "2 or more")
    channels, hidden = heads * dim, sizes.hidden

    def layer(index: int) -> LinearRecurrenceSpec:
        prefix = f"{base.layer_prefix(index)}.self_attn"

        def linear(name: str, outputs: int, inputs: int) -> LinearSpec:
            return LinearSpec(f"{prefix}.{name}_proj", outputs, inputs)

        weights = tuple(TensorSpec(f"{prefix}.{part}_conv1d.weight", (channels, 1, taps)) for part in "qkv")
        return LinearRecurrenceSpec(
            qkv=tuple(linear(part, channels, hidden) for part in "qkv"),
            gate_in=linear("g_a", dim, hidden),
            gate=linear("g_b", channels, dim),
            a_in=linear("f_a", dim, hidden),
            a=linear("f_b", channels, dim),
            b=linear("b", heads, hidden),
            conv=ConvSpec(weights, None, activation=True),
            conv_order="qkv",
            a_log=TensorSpec(f"{prefix}.A_log", (1, 1, heads, 1), is_float32=True),
            a_bias=TensorSpec(f"{prefix}.dt_bias", (channels,), is_float32=True),
            skip=None,
            out_norm=NormSpec(f"{prefix}.o_norm", dim, sizes.eps),
            out=LinearSpec(f"{prefix}.o_proj", hidden, channels, axis=ShardAxis.ROW),
            num_heads=heads,
            num_groups=heads,
            key_dim=dim,
            value_dim=dim,
            is_delta=True,
            are_normed=True,
            gating=Gating.NORM_THEN_SIGMOID,
        )

    return layer


def read_kinds(fields: Fields, num_layers: int) -> tuple[str, ...]:
    """The kind of each layer, by `layer_types`, or by the lists of `linear_attn_config`, which count from 1."""
    types = base.read_layer_types(fields, num_layers, (base.FULL, LINEAR))
    inner = fields.section("linear_attn_config")
    lists = None
    if inner is not None:
        lists = [inner.indices(name, num_layers + 1) for name in ("full_attn_layers", "kda_layers")]
        inner.refuse_unread(("head_dim", "num_heads", "short_conv_kernel_size"))
    if types is not None:
        return types
    if lists is None:
        return tuple(base.FULL if index and index % 4 == 0 else LINEAR for index in range(num_layers))
    if sorted((*lists[0], *lists[1])) != [*range(1, num_layers + 1)]:
        raise fields.wrong("linear_attn_config", f"lists that have each of the layers 1 to {num_layers} once")
    return tuple(base.FULL if number in lists[0] else LINEAR for number in range(1, num_layers + 1))


def _read_size(fields: Fields, name: str, inner_name: str, default: int) -> int:
    value, inner = fields.count(name, default, high=_MAX_SIZE), fields.section("linear_attn_config")
    return value if inner is None else inner.count(inner_name, value, high=_MAX_SIZE)
