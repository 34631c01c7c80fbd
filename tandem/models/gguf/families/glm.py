"""Row of the table `architectures` for GGUF's GLM 4.5 to 4.7: a part of each head is rotated, experts by sigmoid; a
further layer predicts tokens.
"""

from tandem.architecture.fields import Fields
from tandem.models.gguf.families.base import ATTENTION, HEAD_NORMS, Architecture, Config, TargetTensor
from tandem.models.gguf.families.experts import GROUPED, MTP_TENSORS, SIGMOID, read_grouped_experts
from tandem.models.gguf.file import GgufFile

_NORMS = {
    "attn_norm": TargetTensor("input_layernorm"),
    "post_attention_norm": TargetTensor("post_attention_layernorm"),
}


def _read(file: GgufFile, fields: Fields, config: Config) -> dict[str, object]:
    fields.only("expert_gating_func", (SIGMOID,), f"{SIGMOID} (sigmoid)")
    experts = read_grouped_experts(fields)
    groups = fields.count("expert_group_count", 1, high=1 << 12)
    return experts | {
        "n_group": groups,
        "topk_group": fields.count("expert_group_used_count", 1, high=groups),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors,
    }


GLM4_MOE = Architecture(
    "glm4_moe",
    "Glm4MoeForCausalLM",
    ATTENTION | HEAD_NORMS | GROUPED | MTP_TENSORS | _NORMS,
    _read,
    mtp_key="num_nextn_predict_layers",
    has_mtp=True,
    has_partial_rope=True,
    has_bias_option=True,
)
