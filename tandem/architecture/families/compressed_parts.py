"""Builds specs of parts of DeepSeek-V4's attention with their tensor names: output maps of groups of heads, and pools,
which compress tokens into entries (`entry_mixers`).
"""

from collections.abc import Sequence

from tandem.architecture.entry_mixers import PoolSpec
from tandem.architecture.families import base
from tandem.architecture.tensors import LinearSpec, ShardAxis, Source, TensorSpec


def group_maps(prefix: str, num_groups: int, outputs: int, inputs: int) -> Sequence[LinearSpec]:
    """Output maps of groups of heads, stored as rows of one tensor of the checkpoint."""
    name = f"{prefix}.o_a_proj"
    whole = Source(f"{name}.weight")
    parts = (whole.rows(group * outputs, (group + 1) * outputs) for group in range(num_groups))
    return [LinearSpec(f"{name}.{group}", outputs, inputs, weight_source=part) for group, part in enumerate(parts)]


def pool_of(prefix: str, sizes: base.Sizes, size: int, span: int, series: int) -> PoolSpec:
    """Spec of the compression of tokens into entries, with the tensors under `prefix`."""
    return PoolSpec(
        contents=LinearSpec(f"{prefix}.kv_proj", series * size, sizes.hidden, axis=ShardAxis.REPLICATED),
        gates=LinearSpec(f"{prefix}.gate_proj", series * size, sizes.hidden, axis=ShardAxis.REPLICATED),
        bias=TensorSpec(f"{prefix}.position_bias", (span, series * size), is_float32=True),
        norm=sizes.norm(f"{prefix}.kv_norm", size),
        size=size,
        span=span,
        series=series,
    )
