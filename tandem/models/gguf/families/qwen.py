"""Rows of the table `architectures` for GGUF's Qwen 2 and 3, dense and with experts."""

from tandem.architecture.fields import Fields
from tandem.core.errors import CorruptCheckpointError
from tandem.models.gguf.families.base import (
    ATTENTION,
    EXPERTS,
    GATED,
    HEAD_NORMS,
    PRE_NORMS,
    Architecture,
    Config,
    TargetTensor,
)
from tandem.models.gguf.file import GgufFile

_INNER = PRE_NORMS | ATTENTION
_SHARED_GATE = "blk.0.ffn_gate_shexp.weight"
SHARED = {
    "ffn_gate_inp_shexp": TargetTensor("mlp.shared_expert_gate", change=lambda values: values.reshape(1, -1)),
    "ffn_gate_shexp": TargetTensor("mlp.shared_expert.gate_proj"),
    "ffn_up_shexp": TargetTensor("mlp.shared_expert.up_proj"),
    "ffn_down_shexp": TargetTensor("mlp.shared_expert.down_proj"),
}


def read_experts(file: GgufFile, fields: Fields, config: Config) -> dict[str, object]:
    """Reads the experts of every layer."""
    fields.only("expert_gating_func", (1,), "1 (softmax)")
    return {
        "num_experts": fields.count("expert_count", high=1 << 12),
        "num_experts_per_tok": fields.count("expert_used_count", high=1 << 12),
        "moe_intermediate_size": fields.count("expert_feed_forward_length", high=1 << 20),
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def read_shared_expert(file: GgufFile, fields: Fields, config: Config) -> dict[str, object]:
    """Reads experts and a shared expert; files from before May 2024 have the latter's size only in its tensors."""
    if _SHARED_GATE not in file.tensors:
        raise CorruptCheckpointError(f"{file.path} has no tensor {_SHARED_GATE!r}; download or convert it again")
    width = file.tensors[_SHARED_GATE].shape[0]
    fields.only("expert_shared_feed_forward_length", (width,), f"the rows of {_SHARED_GATE}, {width}")
    experts = read_experts(file, fields, config)
    return experts | {"norm_topk_prob": False, "shared_expert_intermediate_size": width}


QWEN2 = Architecture("qwen2", "Qwen2ForCausalLM", _INNER | GATED)
QWEN3 = Architecture("qwen3", "Qwen3ForCausalLM", _INNER | HEAD_NORMS | GATED)
QWEN2_MOE = Architecture("qwen2_moe", "Qwen2MoeForCausalLM", _INNER | EXPERTS | SHARED, read_shared_expert)
QWEN3_MOE = Architecture("qwen3_moe", "Qwen3MoeForCausalLM", _INNER | HEAD_NORMS | EXPERTS, read_experts)
