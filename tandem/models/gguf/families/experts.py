"""Tables of tensors and readers of keys for GGUF architectures with experts as in DeepSeek-V3: chosen by sigmoid within
groups, with shared experts, after some dense layers.
"""

from collections.abc import Mapping
from typing import Final

from tandem.architecture.fields import Fields
from tandem.models.gguf.families.base import EXPERTS, GATED, TargetTensor, as_written

_MAX_SIZE = 1 << 12  # largest accepted in a file
SIGMOID: Final = 2  # value of `expert_gating_func`; 1 is softmax

SHARED_EXPERTS: Final = {
    "ffn_gate_shexp": TargetTensor("mlp.shared_experts.gate_proj"),
    "ffn_up_shexp": TargetTensor("mlp.shared_experts.up_proj"),
    "ffn_down_shexp": TargetTensor("mlp.shared_experts.down_proj"),
}
GROUPED: Final = (
    GATED | EXPERTS | SHARED_EXPERTS | {"exp_probs_b.bias": TargetTensor("mlp.gate.e_score_correction_bias")}
)
MTP_TENSORS: Final = {
    "nextn.eh_proj": TargetTensor("eh_proj"),
    "nextn.embed_tokens": TargetTensor("embed_tokens"),
    "nextn.enorm": TargetTensor("enorm"),
    "nextn.hnorm": TargetTensor("hnorm"),
    "nextn.shared_head_head": TargetTensor("shared_head.head"),
    "nextn.shared_head_norm": TargetTensor("shared_head.norm"),
}
"""Targets of the tensors that only the layer after the last one has, which predicts further tokens."""

_GROUPS: Mapping[tuple[bool, int], tuple[int, int]] = {
    (False, 64): (1, 1),
    (False, 160): (8, 3),
    (True, 64): (1, 1),
    (True, 256): (8, 4),
    (True, 384): (1, 1),
}


def read_grouped_experts(fields: Fields) -> dict[str, object]:
    """Reads numbers of experts and of dense layers, and settings of the chosen experts' weights."""
    return {
        "n_routed_experts": fields.count("expert_count", high=_MAX_SIZE),
        "num_experts_per_tok": fields.count("expert_used_count", high=_MAX_SIZE),
        "moe_intermediate_size": fields.count("expert_feed_forward_length", high=1 << 20),
        "n_shared_experts": fields.count("expert_shared_count", 0, low=0, high=64),
        "first_k_dense_replace": fields.count("leading_dense_block_count", 0, low=0, high=_MAX_SIZE),
        "norm_topk_prob": fields.flag("expert_weights_norm", False),
        "routed_scaling_factor": as_written(fields.number("expert_weights_scale", 1.0)),
    }


def read_groups(fields: Fields, num_experts: object, *, is_sigmoid: bool) -> tuple[int, int]:
    """The number of groups, and of those that are chosen; files from before September 2025 have neither.

    Raises:
        UnsupportedCheckpointError: the file leaves them out, and no published model has this number of experts.
    """
    assert isinstance(num_experts, int)
    known = _GROUPS.get((is_sigmoid, num_experts))
    if known is None and not fields.has("expert_group_count"):
        raise fields.unsupported("expert_group_count", f"a number, which {num_experts} experts do not tell")
    groups, chosen = known or (1, 1)
    groups = fields.count("expert_group_count", groups, high=num_experts)
    return groups, fields.count("expert_group_used_count", min(chosen, groups), high=groups)
