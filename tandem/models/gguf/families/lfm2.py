"""Rows of the table `architectures` for GGUF's LFM2: short convolutions, and attention in layers with KV heads; experts
after some dense layers.
"""

from tandem.architecture.fields import Fields
from tandem.models.gguf.families.base import (
    EMBEDDING,
    Architecture,
    Config,
    TargetTensor,
    as_written,
    channelwise,
    have_attention,
)
from tandem.models.gguf.families.experts import SIGMOID
from tandem.models.gguf.file import GgufFile

_OUTER = {
    EMBEDDING: "model.embed_tokens.weight",
    "token_embd_norm.weight": "model.embedding_norm.weight",
    "output.weight": "lm_head.weight",
}


_INNER = {
    "attn_norm": TargetTensor("operator_norm"),
    "ffn_norm": TargetTensor("ffn_norm"),
    "attn_q": TargetTensor("self_attn.q_proj"),
    "attn_k": TargetTensor("self_attn.k_proj"),
    "attn_v": TargetTensor("self_attn.v_proj"),
    "attn_output": TargetTensor("self_attn.out_proj"),
    "attn_q_norm": TargetTensor("self_attn.q_layernorm"),
    "attn_k_norm": TargetTensor("self_attn.k_layernorm"),
    "shortconv.conv.weight": TargetTensor("conv.conv.weight", change=channelwise),
    "shortconv.in_proj": TargetTensor("conv.in_proj"),
    "shortconv.out_proj": TargetTensor("conv.out_proj"),
    "ffn_gate": TargetTensor("feed_forward.w1"),
    "ffn_up": TargetTensor("feed_forward.w3"),
    "ffn_down": TargetTensor("feed_forward.w2"),
}


def _read(file: GgufFile, fields: Fields, config: Config) -> dict[str, object]:
    """NOTE: the file has the inner size that is computed with, not the one from which it was derived."""
    return {
        "layer_types": ["full_attention" if attends else "conv" for attends in have_attention(fields, config)],
        "conv_L_cache": fields.count("shortconv.l_cache", low=2, high=64),
        "norm_eps": config["rms_norm_eps"],
        "block_auto_adjust_ff_dim": False,
    }


def _read_experts(file: GgufFile, fields: Fields, config: Config) -> dict[str, object]:
    """NOTE: files leave out that the weights of the chosen experts sum to 1, as in all published models."""
    fields.only("expert_gating_func", (SIGMOID,), f"{SIGMOID} (sigmoid)")
    fields.only("expert_weights_norm", (True,), "true")
    found = {name: value for name, value in _read(file, fields, config).items() if name != "block_auto_adjust_ff_dim"}
    num_experts = fields.count("expert_count", high=1 << 12)
    return found | {
        "num_experts": num_experts,
        "num_experts_per_tok": fields.count("expert_used_count", high=num_experts),
        "moe_intermediate_size": fields.count("expert_feed_forward_length", high=1 << 20),
        "num_dense_layers": fields.count("leading_dense_block_count", 0, low=0, high=1 << 10),
        "norm_topk_prob": True,
        "routed_scaling_factor": as_written(fields.number("expert_weights_scale", 1.0)),
        "use_expert_bias": any(name.endswith(_BIAS) for name in file.tensors),
    }


_BIAS = ".exp_probs_b.bias"
_EXPERTS = {
    "ffn_gate_inp": TargetTensor("feed_forward.gate"),
    "exp_probs_b.bias": TargetTensor("feed_forward.expert_bias"),
    "ffn_gate_exps": TargetTensor("feed_forward.experts.{}.w1"),
    "ffn_up_exps": TargetTensor("feed_forward.experts.{}.w3"),
    "ffn_down_exps": TargetTensor("feed_forward.experts.{}.w2"),
}
LFM2_MOE = Architecture(
    "lfm2_moe", "Lfm2MoeForCausalLM", _INNER | _EXPERTS, _read_experts, outer=_OUTER, is_hybrid=True
)
LFM2 = Architecture("lfm2", "Lfm2ForCausalLM", _INNER, _read, outer=_OUTER, is_hybrid=True)
