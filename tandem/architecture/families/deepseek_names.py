"""Translation of the tensor names in DeepSeek's own files of DeepSeek-V4 into those of `transformers`."""

import re

_NAMES = (
    (r"^embed\.", "embed_tokens."),
    (r"^(?=(embed_tokens|layers|norm|hc_head)\b|hc_head_)", "model."),
    (r"^head\.", "lm_head."),
    (r"\bhc_head_(fn|base|scale)$", r"hc_head.hc_\1"),
    (r"\.hc_(attn|ffn)_(fn|base|scale)$", r".\1_hc.\2"),
    (r"\.attn_norm\.", ".input_layernorm."),
    (r"\.ffn_norm\.", ".post_attention_layernorm."),
    (r"\.ffn\.", ".mlp."),
    (r"\.attn\.", ".self_attn."),
    (r"\.attn_sink$", ".sinks"),
    (r"\.self_attn\.indexer\.compressor\.", ".self_attn.compressor.indexer."),
    (r"\.self_attn\.indexer\.weights_proj\.", ".self_attn.compressor.indexer.scorer.weights_proj."),
    (r"\.self_attn\.indexer\.wq_b\.", ".self_attn.compressor.indexer.q_b_proj."),
    (r"(\.(?:self_attn|compressor|indexer))\.norm\.", r"\1.kv_norm."),
    (r"\.ape$", ".position_bias"),
    (r"\.self_attn\.q_norm\.", ".self_attn.q_a_norm."),
    (r"\.wq_([ab])\.", r".q_\1_proj."),
    (r"\.wo_([ab])\.", r".o_\1_proj."),
    (r"\.wkv\.", ".kv_proj."),
    (r"\.wgate\.", ".gate_proj."),
    (r"\.gate\.bias$", ".gate.e_score_correction_bias"),
    (r"(experts(?:\.\d+)?)\.w1\.", r"\1.gate_proj."),
    (r"(experts(?:\.\d+)?)\.w2\.", r"\1.down_proj."),
    (r"(experts(?:\.\d+)?)\.w3\.", r"\1.up_proj."),
)
"""From DeepSeek's names to `transformers`', one after the other."""


def parameter_name(name: str) -> str:
    """Maps a tensor's name as `Family.parameter_name` does."""
    for pattern, ours in _NAMES:
        name = re.sub(pattern, ours, name)
    return name
