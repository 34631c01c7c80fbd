"""Mamba-2 mixers under the names that several families share: one map to gate, values, keys, queries and steps."""

import math
from dataclasses import dataclass
from typing import Final

from tandem.architecture.fields import Fields
from tandem.architecture.recurrent_mixers import Gating, LinearRecurrenceSpec, conv_spec
from tandem.architecture.tensors import LinearSpec, NormSpec, ShardAxis, Source, TensorSpec

CHUNK_KEYS: Final = ("mamba_chunk_size",)  # a recurrence gives the same but for rounding however it is cut


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpaceSizes:
    """Sizes in elements. `eps`: of the norm after the gate, None = there is no norm; `bias`: of the maps in and out."""

    hidden: int
    num_heads: int
    head_dim: int
    num_groups: int
    state_dim: int
    taps: int
    eps: float | None
    bias: bool
    conv_bias: bool

    @property
    def inner(self) -> int:
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

        norm = None if self.eps is None else NormSpec(f"{prefix}.norm", self.inner, self.eps)
        return LinearRecurrenceSpec(
            gate=part("gate", 0, self.inner),
            qkv=(part("qkv", self.inner, channels),),
            a=part("step", self.inner + channels, self.num_heads),
            b=None,
            conv=conv_spec(f"{prefix}.conv1d", channels, self.taps, bias=self.conv_bias),
            conv_order="vkq",
            a_log=TensorSpec(f"{prefix}.A_log", (self.num_heads,), is_float32=True),
            a_bias=TensorSpec(f"{prefix}.dt_bias", (self.num_heads,), is_float32=True),
            skip=TensorSpec(f"{prefix}.D", (self.num_heads,), is_float32=True),
            out_norm=norm,
            out=LinearSpec(f"{prefix}.out_proj", self.hidden, self.inner, self.bias, ShardAxis.ROW),
            num_heads=self.num_heads,
            num_groups=self.num_groups,
            key_dim=self.state_dim,
            value_dim=self.head_dim,
            is_delta=False,
            are_normed=False,
            gating=Gating.GATE if norm is None else Gating.GATE_THEN_NORM,
            num_norm_groups=self.num_groups,
        )


def check_step_limit(fields: Fields) -> None:
    """Refuses bounds of a step: `transformers` applies them to a prompt and not to what follows."""
    fields.only("number_of_conv_states", (1,), "1")
    limits = fields.get("time_step_limit")
    if limits is not None and limits not in ([0.0, math.inf], [0.0, {"__float__": "Infinity"}]):
        raise fields.unsupported("time_step_limit", "[0.0, Infinity]")


def read_kinds(fields: Fields, num_layers: int, recurrent: tuple[str, ...], attending: tuple[str, ...]) -> list[bool]:
    """For each layer of `layer_types` whether it has a recurrent state, by the names that files have for both kinds."""
    types = fields.texts("layer_types") or fields.texts("layers_block_type") or (recurrent[0],) * num_layers
    if not {*types} <= {*recurrent, *attending}:
        raise fields.unsupported("layer_types", ", ".join((*recurrent, *attending)))
    return [kind in recurrent for kind in types]
