"""Row of the table `architectures` for GGUF's Qwen3-Next, converted to the form of Qwen3.5, which computes the same
from maps stored as separate tensors.
"""

import numpy as np
from numpy.typing import NDArray

from tandem.architecture.fields import Fields
from tandem.models.gguf.families.base import (
    ATTENTION,
    EXPERTS,
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
from tandem.models.gguf.file import GgufFile

_MAX_SIZE = 1 << 12  # largest accepted in a file


def _half_of_groups(half: int) -> IndexOrder:
    """Order that takes each group's first or second half of rows."""

    def order(num_rows: int, config: Config) -> NDArray[np.intp]:
        groups = config["linear_num_key_heads"]
        assert isinstance(groups, int)
        return np.arange(num_rows - num_rows % (2 * groups)).reshape(groups, 2, -1)[:, half].reshape(-1)

    return order


_INNER: TargetTensors = (
    ATTENTION
    | HEAD_NORMS
    | EXPERTS
    | SHARED
    | {
        "attn_norm": TargetTensor("input_layernorm"),
        "post_attention_norm": TargetTensor("post_attention_layernorm"),
        "attn_qkv": TargetTensor("linear_attn.in_proj_qkv"),
        "attn_gate": TargetTensor("linear_attn.in_proj_z"),
        "ssm_conv1d": TargetTensor("linear_attn.conv1d", change=channelwise),
        "ssm_dt.bias": TargetTensor("linear_attn.dt_bias"),
        "ssm_a": TargetTensor("linear_attn.A_log", change=log_of_negated),
        "ssm_norm": TargetTensor("linear_attn.norm"),
        "ssm_out": TargetTensor("linear_attn.out_proj"),
    }
    | {
        "ssm_ba": (
            TargetTensor("linear_attn.in_proj_b", _half_of_groups(0)),
            TargetTensor("linear_attn.in_proj_a", _half_of_groups(1)),
        )
    }
)


def read_delta_net(fields: Fields) -> dict[str, object]:
    """Sizes of the recurrent layers, and the interval of layers with attention."""
    heads, inner = fields.count("ssm.time_step_rank", high=_MAX_SIZE), fields.count("ssm.inner_size", high=1 << 20)
    if inner % heads:
        raise fields.wrong("ssm.inner_size", f"a multiple of ssm.time_step_rank={heads}")
    return {
        "full_attention_interval": fields.count("full_attention_interval", 4),
        "linear_num_value_heads": heads,
        "linear_value_head_dim": inner // heads,
        "linear_num_key_heads": fields.count("ssm.group_count", high=_MAX_SIZE),
        "linear_key_head_dim": fields.count("ssm.state_size", high=_MAX_SIZE),
        "linear_conv_kernel_dim": fields.count("ssm.conv_kernel", low=2, high=64),
    }


def _read(file: GgufFile, fields: Fields, config: Config) -> dict[str, object]:
    return read_shared_expert(file, fields, config) | {"norm_topk_prob": True} | read_delta_net(fields)


QWEN3_NEXT = Architecture(
    "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", _INNER, _read, norm_offset=1.0, has_partial_rope=True
)
