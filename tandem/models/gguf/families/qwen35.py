"""Rows of the table `architectures` for GGUF's Qwen3.5, dense and with experts. Files have its value heads in another
order: by number within a group, then by group.

Rows are put back in the checkpoint's order. Columns are too if whole quantised blocks can be moved; the output map of
the heads, whose blocks are longer than a head, is decoded. Rotary sections, which matter for images, become one.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from tandem.architecture.fields import Fields
from tandem.core.errors import CorruptCheckpointError
from tandem.models.gguf.families.base import (
    ATTENTION,
    EXPERTS,
    GATED,
    HEAD_NORMS,
    Architecture,
    Config,
    IndexOrder,
    TargetTensor,
    TargetTensors,
    channelwise,
    log_of_negated,
)
from tandem.models.gguf.families.qwen import SHARED, read_shared_expert
from tandem.models.gguf.families.qwen_next import read_delta_net
from tandem.models.gguf.file import GgufFile


def _size(config: Config, name: str) -> int:
    value = config[name]
    assert isinstance(value, int)
    return value


def _by_groups(rows_per_head: Callable[[Config], int], *, has_keys: bool = False) -> IndexOrder:
    """Order that puts the rows or columns of value heads back by group.

    Args:
        rows_per_head: number of rows of a head.
        has_keys: the rows of queries and keys come before them.
    """

    def order(num_rows: int, config: Config) -> NDArray[np.intp]:
        groups, heads = _size(config, "linear_num_key_heads"), _size(config, "linear_num_value_heads")
        before = 2 * groups * _size(config, "linear_key_head_dim") if has_keys else 0
        if num_rows != before + heads * rows_per_head(config):
            raise CorruptCheckpointError(
                f"there are {num_rows} rows or columns and not {before + heads * rows_per_head(config)}, as {heads} "
                "value heads have"
            )
        values = np.arange(before, num_rows).reshape(heads // groups, groups, -1).swapaxes(0, 1)
        return np.concatenate([np.arange(before), values.reshape(-1)])

    return order


def _value_dim(config: Config) -> int:
    return _size(config, "linear_value_head_dim")


def _one(config: Config) -> int:
    return 1


_DELTA: TargetTensors = {
    "attn_norm": TargetTensor("input_layernorm"),
    "post_attention_norm": TargetTensor("post_attention_layernorm"),
    "attn_qkv": TargetTensor("linear_attn.in_proj_qkv", _by_groups(_value_dim, has_keys=True)),
    "attn_gate": TargetTensor("linear_attn.in_proj_z", _by_groups(_value_dim)),
    "ssm_beta": TargetTensor("linear_attn.in_proj_b", _by_groups(_one)),
    "ssm_alpha": TargetTensor("linear_attn.in_proj_a", _by_groups(_one)),
    "ssm_conv1d": TargetTensor("linear_attn.conv1d", _by_groups(_value_dim, has_keys=True), change=channelwise),
    "ssm_dt.bias": TargetTensor("linear_attn.dt_bias", _by_groups(_one)),
    "ssm_a": TargetTensor("linear_attn.A_log", _by_groups(_one), change=log_of_negated),
    "ssm_norm": TargetTensor("linear_attn.norm"),
    "ssm_out": TargetTensor("linear_attn.out_proj", columns=_by_groups(_value_dim)),
}


def _half(half: int) -> IndexOrder:
    """Order that takes the first or second half of all rows."""

    def order(num_rows: int, config: Config) -> NDArray[np.intp]:
        size = num_rows // 2
        return np.arange(half * size, (half + 1) * size)

    return order


_FUSED: TargetTensors = {
    "ffn_gate_up_exps": (
        TargetTensor("mlp.experts.{}.gate_proj", _half(0)),
        TargetTensor("mlp.experts.{}.up_proj", _half(1)),
    )
}


def _read(file: GgufFile, fields: Fields, config: Config) -> dict[str, object]:
    fields.get("rope.dimension_sections")
    found = read_delta_net(fields)
    heads, groups = found["linear_num_value_heads"], found["linear_num_key_heads"]
    assert isinstance(heads, int)
    assert isinstance(groups, int)
    if heads % groups:
        raise fields.wrong("ssm.time_step_rank", f"a multiple of ssm.group_count={groups}")
    return found


def _read_experts(file: GgufFile, fields: Fields, config: Config) -> dict[str, object]:
    return read_shared_expert(file, fields, config) | {"norm_topk_prob": True} | _read(file, fields, config)


_INNER: TargetTensors = {**ATTENTION, **HEAD_NORMS, **_DELTA}
QWEN35 = Architecture(
    "qwen3_5_text",
    "Qwen3_5ForCausalLM",
    {**_INNER, **GATED},
    _read,
    norm_offset=1.0,
    has_mtp=True,
    has_partial_rope=True,
)
QWEN35_MOE = Architecture(
    "qwen3_5_moe_text",
    "Qwen3_5MoeForCausalLM",
    {**_INNER, **EXPERTS, **SHARED, **_FUSED},
    _read_experts,
    norm_offset=1.0,
    has_mtp=True,
    has_partial_rope=True,
)
