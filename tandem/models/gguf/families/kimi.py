"""Row of the table `architectures` for GGUF's Kimi-Linear: Kimi delta attention, and in some layers latent attention
without positions.
"""

from tandem.architecture.fields import Fields
from tandem.models.gguf.families.base import (
    PRE_NORMS,
    Architecture,
    Config,
    Floats,
    TargetTensor,
    have_attention,
    log_of_negated,
)
from tandem.models.gguf.families.deepseek import LATENT, read_latents
from tandem.models.gguf.families.experts import SIGMOID, read_grouped_experts
from tandem.models.gguf.file import GgufFile


def _decays(values: Floats) -> Floats:
    return log_of_negated(values).reshape(1, 1, -1, 1)


def _taps(values: Floats) -> Floats:
    """# [1, channels, 1, taps] to [channels, 1, taps]"""
    return values.reshape(-1, 1, values.shape[-1])


_DELTA = {
    "attn_k": TargetTensor("self_attn.k_proj"),
    "attn_v": TargetTensor("self_attn.v_proj"),
    **{f"ssm_conv1d_{part}.weight": TargetTensor(f"self_attn.{part}_conv1d.weight", change=_taps) for part in "qkv"},
    "ssm_f_a": TargetTensor("self_attn.f_a_proj"),
    "ssm_f_b": TargetTensor("self_attn.f_b_proj"),
    "ssm_g_a": TargetTensor("self_attn.g_a_proj"),
    "ssm_g_b": TargetTensor("self_attn.g_b_proj"),
    "ssm_beta": TargetTensor("self_attn.b_proj"),
    "ssm_a": TargetTensor("self_attn.A_log", change=_decays),
    "ssm_dt.bias": TargetTensor("self_attn.dt_bias"),
    "ssm_norm": TargetTensor("self_attn.o_norm"),
}
_EXPERTS = {
    "ffn_gate": TargetTensor("mlp.gate_proj"),
    "ffn_up": TargetTensor("mlp.up_proj"),
    "ffn_down": TargetTensor("mlp.down_proj"),
    "ffn_gate_inp": TargetTensor("block_sparse_moe.gate"),
    "exp_probs_b.bias": TargetTensor("block_sparse_moe.gate.e_score_correction_bias"),
    "ffn_gate_exps": TargetTensor("block_sparse_moe.experts.{}.w1"),
    "ffn_up_exps": TargetTensor("block_sparse_moe.experts.{}.w3"),
    "ffn_down_exps": TargetTensor("block_sparse_moe.experts.{}.w2"),
    "ffn_gate_shexp": TargetTensor("block_sparse_moe.shared_experts.gate_proj"),
    "ffn_up_shexp": TargetTensor("block_sparse_moe.shared_experts.up_proj"),
    "ffn_down_shexp": TargetTensor("block_sparse_moe.shared_experts.down_proj"),
}
_NAMES = {
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
    "norm_topk_prob": "moe_renormalize",
}


def _read(file: GgufFile, fields: Fields, config: Config) -> dict[str, object]:
    """NOTE: the chosen experts' weights are always divided by their sum, which the files do not say."""
    fields.only("expert_gating_func", (SIGMOID,), f"{SIGMOID} (sigmoid)")
    fields.only("expert_weights_norm", (True,), "true")
    groups = fields.count("expert_group_count", 1, high=1 << 12)
    experts = read_grouped_experts(fields) | {"norm_topk_prob": True}
    return {
        **{_NAMES.get(name, name): value for name, value in experts.items()},
        **read_latents(fields, config["head_dim"]),
        "layer_types": ["full_attention" if full else "linear_attention" for full in have_attention(fields, config)],
        "linear_head_dim": fields.count("kda.head_dim", high=1 << 12),
        "linear_num_heads": config["num_attention_heads"],
        "linear_conv_kernel_dim": fields.count("ssm.conv_kernel", low=2, high=64),
        "num_expert_group": groups,
        "topk_group": fields.count("expert_group_used_count", 1, high=groups),
    }


KIMI_LINEAR = Architecture(
    "kimi_linear",
    "KimiLinearForCausalLM",
    {**PRE_NORMS, **LATENT, **_DELTA, **_EXPERTS},
    _read,
    is_hybrid=True,
    is_latent=True,
)
