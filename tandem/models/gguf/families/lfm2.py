"""LFM2: short convolutions, and attention where a layer has heads of k and v."""

from tandem.architecture.fields import Fields
from tandem.models.gguf.families.base import EMBEDDING, Architecture, Config, Place, channelwise, have_attention
from tandem.models.gguf.file import GgufFile

_OUTER = {
    EMBEDDING: "model.embed_tokens.weight",
    "token_embd_norm.weight": "model.embedding_norm.weight",
    "output.weight": "lm_head.weight",
}


_INNER = {
    "attn_norm": Place("operator_norm"),
    "ffn_norm": Place("ffn_norm"),
    "attn_q": Place("self_attn.q_proj"),
    "attn_k": Place("self_attn.k_proj"),
    "attn_v": Place("self_attn.v_proj"),
    "attn_output": Place("self_attn.out_proj"),
    "attn_q_norm": Place("self_attn.q_layernorm"),
    "attn_k_norm": Place("self_attn.k_layernorm"),
    "shortconv.conv.weight": Place("conv.conv.weight", change=channelwise),
    "shortconv.in_proj": Place("conv.in_proj"),
    "shortconv.out_proj": Place("conv.out_proj"),
    "ffn_gate": Place("feed_forward.w1"),
    "ffn_up": Place("feed_forward.w3"),
    "ffn_down": Place("feed_forward.w2"),
}


def _read(file: GgufFile, fields: Fields, config: Config) -> dict[str, object]:
    """NOTE: the file has the width that is computed with, not the one from which it was derived."""
    return {
        "layer_types": ["full_attention" if attends else "conv" for attends in have_attention(fields, config)],
        "conv_L_cache": fields.count("shortconv.l_cache", low=2, high=64),
        "norm_eps": config["rms_norm_eps"],
        "block_auto_adjust_ff_dim": False,
    }


LFM2 = Architecture("lfm2", "Lfm2ForCausalLM", _INNER, _read, outer=_OUTER, is_hybrid=True)
