"""Reads Mamba mixers with the keys and tensor names of Jamba: one map to channels and gate, one to steps, keys and
queries.
"""

import math
from dataclasses import dataclass

from tandem.architecture.families.base import Sizes
from tandem.architecture.fields import Fields
from tandem.architecture.recurrent_mixers import SelectiveScanSpec, conv_spec
from tandem.architecture.tensors import LinearSpec, NormSpec, ShardAxis, Source, TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanSizes:
    """Sizes of a mixer in elements. `taps`: tokens of the convolution. `bias`: of the input and output maps."""

    hidden: int
    channels: int
    state_dim: int
    step_rank: int
    taps: int
    eps: float
    bias: bool
    conv_bias: bool

    def mixer(self, prefix: str) -> SelectiveScanSpec:
        """The mixer whose tensors are under `prefix`. Steps are delta of the paper, keys B and queries C."""

        def half(name: str, start: int) -> LinearSpec:
            """Rows of the one map in."""
            weight, bias = (
                Source(f"{prefix}.in_proj.{kind}", start=start, stop=start + self.channels)
                for kind in ("weight", "bias")
            )
            return LinearSpec(
                f"{prefix}.{name}", self.channels, self.hidden, self.bias, weight_source=weight, bias_source=bias
            )

        num_terms = self.step_rank + 2 * self.state_dim
        norms = {"dt": self.step_rank, "b": self.state_dim, "c": self.state_dim}
        return SelectiveScanSpec(
            x=half("x", 0),
            gate=half("gate", self.channels),
            conv=conv_spec(f"{prefix}.conv1d", self.channels, self.taps, bias=self.conv_bias),
            terms=LinearSpec(f"{prefix}.x_proj", num_terms, self.channels, axis=ShardAxis.ROW),
            norms=tuple(NormSpec(f"{prefix}.{name}_layernorm", size, self.eps) for name, size in norms.items()),
            steps=LinearSpec(f"{prefix}.dt_proj", self.channels, self.step_rank),
            a_log=TensorSpec(f"{prefix}.A_log", (self.channels, self.state_dim), is_float32=True, is_small=True),
            a_bias=TensorSpec(f"{prefix}.dt_proj.bias", (self.channels,), is_float32=True),
            skip=TensorSpec(f"{prefix}.D", (self.channels,), is_float32=True),
            out=LinearSpec(f"{prefix}.out_proj", self.hidden, self.channels, self.bias, ShardAxis.ROW),
        )


def read_scan(fields: Fields, sizes: Sizes) -> ScanSizes:
    """Reads the sizes of mixers whose keys begin with `mamba_`."""
    fields.only("hidden_act", ("silu", "swish"), "silu")  # NOTE: it is the convolution's, too
    fields.only("mamba_inner_layernorms", (True,), "true")
    given = fields.get("mamba_dt_rank") not in (None, "auto")
    return ScanSizes(
        hidden=sizes.hidden,
        channels=fields.count("mamba_expand", 2, high=64) * sizes.hidden,
        state_dim=fields.count("mamba_d_state", 16, high=1 << 10),
        step_rank=fields.count("mamba_dt_rank") if given else math.ceil(sizes.hidden / 16),
        taps=fields.count("mamba_d_conv", 4, low=2, high=64),
        eps=sizes.eps,
        bias=fields.flag("mamba_proj_bias", False),
        conv_bias=fields.flag("mamba_conv_bias", True),
    )
