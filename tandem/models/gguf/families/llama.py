"""Rows of the table `architectures` for GGUF's Llama, Mistral without a window and Mixtral: rotated pairs are
neighbouring rows of q and k.
"""

from tandem.architecture.fields import Fields
from tandem.models.gguf.families.base import (
    ATTENTION_WITH_PAIRED_ROWS,
    GATED,
    PRE_NORMS,
    Architecture,
    Config,
    TargetTensor,
)
from tandem.models.gguf.file import GgufFile

_EXPERTS = {
    "ffn_gate_inp": TargetTensor("block_sparse_moe.gate"),
    "ffn_gate_exps": TargetTensor("block_sparse_moe.experts.{}.w1"),
    "ffn_up_exps": TargetTensor("block_sparse_moe.experts.{}.w3"),
    "ffn_down_exps": TargetTensor("block_sparse_moe.experts.{}.w2"),
}


def _read_experts(file: GgufFile, fields: Fields, config: Config) -> dict[str, object]:
    width = config["intermediate_size"]
    fields.only("expert_feed_forward_length", (width,), f"as feed_forward_length, {width}")
    return {
        "num_local_experts": fields.count("expert_count", high=1 << 12),
        "num_experts_per_tok": fields.count("expert_used_count", high=1 << 12),
        "sliding_window": None,
    }


MIXTRAL = Architecture(
    "mixtral", "MixtralForCausalLM", PRE_NORMS | ATTENTION_WITH_PAIRED_ROWS | _EXPERTS, _read_experts
)
LLAMA = Architecture(
    "llama",
    "LlamaForCausalLM",
    PRE_NORMS | ATTENTION_WITH_PAIRED_ROWS | GATED,
    with_experts=MIXTRAL,
    has_bias_option=True,
)
