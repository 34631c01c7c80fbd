"""Reads Mamba-2 mixers with keys and tensor names that several families share: one map to gate, values, keys, queries
and steps.
"""

import math
from dataclasses import dataclass
from typing import Final

from tandem.architecture.families.base import Sizes
from tandem.architecture.fields import Fields
from tandem.architecture.recurrent_mixers import Gating, LinearRecurrenceSpec, conv_spec
from tandem.architecture.tensors import LinearSpec, NormSpec, ShardAxis, Source, TensorSpec

CHUNK_KEYS: Final = ("mamba_chunk_size",)  # chunks of a recurrence change only rounding


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpaceSizes:
    """Sizes of a mixer in elements.

    Args:
        taps: tokens of the convolution.
        eps: epsilon of the norm of values and gate; None = there is no norm.
        bias: whether the input and output maps have biases.
        is_normed_first: the norm is applied before the gate.
        scales: factors of the input map's outputs: gate, values, keys, queries and steps.
        out_scale: factor of the output map.
    """

    hidden: int
    num_heads: int
    head_dim: int
    num_groups: int
    state_dim: int
    taps: int
    eps: float | None
    bias: bool
    conv_bias: bool
    is_normed_first: bool = False
    scales: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0, 1.0)
    out_scale: float = 1.0

    @property
    def inner(self) -> int:
        """Elements of the values of all heads."""
        return self.num_heads * self.head_dim

    def mixer(self, prefix: str) -> LinearRecurrenceSpec:
        """The mixer whose tensors are under `prefix`. Values are x, keys B and queries C of the paper."""
        groups = self.num_groups * self.state_dim
        channels = self.inner + 2 * groups

        def part(name: str, start: int, outputs: int) -> LinearSpec:
            """Rows of the one map in."""
            weight, bias = (
                Source(f"{prefix}.in_proj.{kind}", start=start, stop=start + outputs) for kind in ("weight", "bias")
            )
            return LinearSpec(
                f"{prefix}.{name}", outputs, self.hidden, self.bias, weight_source=weight, bias_source=bias
            )

        gate, *mixed, step = self.scales
        if len({*mixed}) == 1:
            qkv = [part("qkv", self.inner, channels)]
        else:
            starts = self.inner, 2 * self.inner, 2 * self.inner + groups
            widths = self.inner, groups, groups
            qkv = [part(name, start, width) for name, start, width in zip("vkq", starts, widths, strict=True)]
        norm = None if self.eps is None else NormSpec(f"{prefix}.norm", self.inner, self.eps)
        return LinearRecurrenceSpec(
            gate=part("gate", 0, self.inner).times(gate),
            qkv=tuple(linear.times(scale) for linear, scale in zip(qkv, mixed, strict=False)),
            a=part("step", self.inner + channels, self.num_heads).times(step),
            b=None,
            conv=conv_spec(f"{prefix}.conv1d", channels, self.taps, bias=self.conv_bias),
            conv_order="vkq",
            a_log=TensorSpec(f"{prefix}.A_log", (self.num_heads,), is_float32=True),
            a_bias=TensorSpec(f"{prefix}.dt_bias", (self.num_heads,), is_float32=True),
            skip=TensorSpec(f"{prefix}.D", (self.num_heads,), is_float32=True),
            out_norm=norm,
            out=LinearSpec(f"{prefix}.out_proj", self.hidden, self.inner, self.bias, ShardAxis.ROW).times(
                self.out_scale
            ),
            num_heads=self.num_heads,
            num_groups=self.num_groups,
            key_dim=self.state_dim,
            value_dim=self.head_dim,
            is_delta=False,
            are_normed=False,
            gating=self._gating,
            num_norm_groups=self.num_groups,
        )

    @property
    def _gating(self) -> Gating:
        if self.eps is None:
            return Gating.GATE
        return Gating.GROUPS_THEN_GATE if self.is_normed_first else Gating.GATE_THEN_NORM


def read_state_space(fields: Fields, sizes: Sizes, inner: int) -> StateSpaceSizes:
    """Reads the sizes of mixers whose keys begin with `mamba_`; `inner`: elements of the values of all heads."""
    check_step_limit(fields)
    fields.only("hidden_act", ("silu", "swish"), "silu")  # NOTE: it is the convolution's, too
    heads = fields.count("mamba_n_heads", 128, high=1 << 12)
    groups = fields.count("mamba_n_groups", 1, high=heads)
    head_dim = inner // heads if fields.get("mamba_d_head") in (None, "auto") else fields.count("mamba_d_head")
    if head_dim * heads != inner:
        raise fields.wrong("mamba_n_heads", f"heads of mamba_d_head elements that make {inner} together")
    if heads % groups:
        raise fields.wrong("mamba_n_groups", f"a divisor of mamba_n_heads={heads}")
    return StateSpaceSizes(
        hidden=sizes.hidden,
        num_heads=heads,
        head_dim=head_dim,
        num_groups=groups,
        state_dim=fields.count("mamba_d_state", 256, high=1 << 12),
        taps=fields.count("mamba_d_conv", 4, low=2, high=64),
        eps=sizes.eps,
        bias=fields.flag("mamba_proj_bias", False),
        conv_bias=fields.flag("mamba_conv_bias", True),
    )


def check_step_limit(fields: Fields) -> None:
    """Refuses bounds of a step: `transformers` applies them to a prompt but not to generated tokens."""
    fields.only("number_of_conv_states", (1,), "1")
    limits = fields.get("time_step_limit")
    if limits is not None and limits not in ([0.0, math.inf], [0.0, {"__float__": "Infinity"}]):
        raise fields.unsupported("time_step_limit", "[0.0, Infinity]")


def read_kinds(fields: Fields, num_layers: int, recurrent: tuple[str, ...], attending: tuple[str, ...]) -> list[bool]:
    """For each layer whether it has a recurrent state, by the names of the two kinds in `layer_types`."""
    types = fields.texts("layer_types") or fields.texts("layers_block_type") or (recurrent[0],) * num_layers
    if not {*types} <= {*recurrent, *attending}:
        raise fields.unsupported("layer_types", ", ".join((*recurrent, *attending)))
    return [kind in recurrent for kind in types]
