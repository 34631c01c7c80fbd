"""Reads gated DeltaNet mixers (arXiv:2412.06464) with the keys and tensor names of Qwen3-Next and Qwen3.5."""

from dataclasses import dataclass

from tandem.architecture.families.base import Sizes
from tandem.architecture.fields import Fields
from tandem.architecture.recurrent_mixers import Gating, LinearRecurrenceSpec, conv_spec
from tandem.architecture.tensors import LinearSpec, NormSpec, ShardAxis, TensorSpec

_MAX_SIZE = 1 << 12  # largest accepted in a file


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNetMaps:
    """The input projections of a mixer, with the meaning they have in `LinearRecurrenceSpec`."""

    qkv: tuple[LinearSpec, ...]
    gate: LinearSpec
    a: LinearSpec
    b: LinearSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNetSizes:
    """Sizes of a mixer in elements. Each of `num_groups` queries and keys serves several consecutive ones of
    `num_heads` values. `taps`: tokens of the convolution.
    """

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

    def mixer(self, prefix: str, maps: DeltaNetMaps) -> LinearRecurrenceSpec:
        """The mixer with tensors under `prefix`. NOTE: its norm multiplies by its weight, others by 1 + weight."""
        return LinearRecurrenceSpec(
            qkv=maps.qkv,
            gate=maps.gate,
            a=maps.a,
            b=maps.b,
            conv=conv_spec(f"{prefix}.conv1d", self.channels, self.taps, bias=False),
            conv_order="qkv",
            a_log=TensorSpec(f"{prefix}.A_log", (self.num_heads,), is_float32=True),
            a_bias=TensorSpec(f"{prefix}.dt_bias", (self.num_heads,), is_float32=True),
            skip=None,
            out_norm=NormSpec(f"{prefix}.norm", self.value_dim, self.eps),
            out=LinearSpec(f"{prefix}.out_proj", self.hidden, self.num_heads * self.value_dim, axis=ShardAxis.ROW),
            num_heads=self.num_heads,
            num_groups=self.num_groups,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
            is_delta=True,
            are_normed=True,
            gating=Gating.NORM_THEN_GATE,
        )


def read_delta_net(fields: Fields, sizes: Sizes) -> DeltaNetSizes:
    """Reads the sizes of mixers whose keys begin with `linear_`."""
    heads = fields.count("linear_num_value_heads", 32, high=_MAX_SIZE)
    groups = fields.count("linear_num_key_heads", 16, high=_MAX_SIZE)
    if heads % groups:
        raise fields.wrong("linear_num_key_heads", f"a divisor of linear_num_value_heads={heads}")
    return DeltaNetSizes(
        hidden=sizes.hidden,
        num_heads=heads,
        num_groups=groups,
        key_dim=fields.count("linear_key_head_dim", 128, high=_MAX_SIZE),
        value_dim=fields.count("linear_value_head_dim", 128, high=_MAX_SIZE),
        taps=fields.count("linear_conv_kernel_dim", 4, low=2, high=64),
        eps=sizes.eps,
    )
