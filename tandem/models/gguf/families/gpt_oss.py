"""Row of the table `architectures` for GGUF's gpt-oss: biases everywhere, sinks, windows on every other layer, YaRN not
rounded to whole dimensions.
"""

from tandem.architecture.fields import Fields
from tandem.models.gguf.families.base import ATTENTION, Architecture, Config, TargetTensor
from tandem.models.gguf.file import GgufFile

_INNER = ATTENTION | {
    "attn_norm": TargetTensor("input_layernorm"),
    "post_attention_norm": TargetTensor("post_attention_layernorm"),
    "attn_sinks.weight": TargetTensor("self_attn.sinks"),
    "ffn_gate_inp": TargetTensor("mlp.router"),
    "ffn_gate_exps": TargetTensor("mlp.experts.{}.gate_proj"),
    "ffn_up_exps": TargetTensor("mlp.experts.{}.up_proj"),
    "ffn_down_exps": TargetTensor("mlp.experts.{}.down_proj"),
}


def _read(file: GgufFile, fields: Fields, config: Config) -> dict[str, object]:
    width = fields.count("expert_feed_forward_length", high=1 << 20)
    found: dict[str, object] = {
        "intermediate_size": width,
        "num_local_experts": fields.count("expert_count", high=1 << 12),
        "num_experts_per_tok": fields.count("expert_used_count", high=1 << 12),
        "sliding_window": fields.count("attention.sliding_window"),
        "attention_bias": True,
    }
    scaling = config.get("rope_scaling")
    if not isinstance(scaling, dict):
        return found | {"rope_scaling": {"rope_type": "default", "rope_theta": config["rope_theta"]}}
    return found | {"rope_scaling": scaling | {"truncate": False}}


GPT_OSS = Architecture("gpt_oss", "GptOssForCausalLM", _INNER, _read, ends=("<|return|>", "<|call|>", "<|endoftext|>"))
