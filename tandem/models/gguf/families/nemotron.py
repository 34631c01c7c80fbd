"""Rows of the table `architectures` for GGUF's Nemotron-H, Nemotron Nano 2 and Nemotron 3: each layer is a mixer, a
feed-forward block or experts.

Converters store rows of q and k in pairs, as for rotary embeddings, although these models rotate nothing.
"""

from dataclasses import replace

from tandem.architecture.fields import Fields
from tandem.models.gguf.families.base import (
    EMBEDDING,
    Architecture,
    Config,
    TargetTensor,
    as_written,
    in_halves,
)
from tandem.models.gguf.families.experts import SIGMOID
from tandem.models.gguf.families.state_space import read_state_space, state_space
from tandem.models.gguf.file import GgufFile

_OUTER = {
    EMBEDDING: "backbone.embeddings.weight",
    "output_norm.weight": "backbone.norm_f.weight",
    "output.weight": "lm_head.weight",
}
_INNER = state_space("mixer") | {
    "attn_norm": TargetTensor("norm"),
    "attn_q": TargetTensor("mixer.q_proj", in_halves("num_attention_heads")),
    "attn_k": TargetTensor("mixer.k_proj", in_halves("num_key_value_heads")),
    "attn_v": TargetTensor("mixer.v_proj"),
    "attn_output": TargetTensor("mixer.o_proj"),
    "ffn_up": TargetTensor("mixer.up_proj"),
    "ffn_down": TargetTensor("mixer.down_proj"),
}
_BLOCK_BIASES = (".ffn_up.bias", ".ffn_up_shexp.bias")
_EXPERTS = {
    "ffn_gate_inp": TargetTensor("mixer.gate"),
    "exp_probs_b.bias": TargetTensor("mixer.gate.e_score_correction_bias"),
    "ffn_up_exps": TargetTensor("mixer.experts.{}.up_proj"),
    "ffn_down_exps": TargetTensor("mixer.experts.{}.down_proj"),
    "ffn_up_shexp": TargetTensor("mixer.shared_experts.up_proj"),
    "ffn_down_shexp": TargetTensor("mixer.shared_experts.down_proj"),
    "ffn_latent_down": TargetTensor("mixer.fc1_latent_proj"),
    "ffn_latent_up": TargetTensor("mixer.fc2_latent_proj"),
}


def _read(file: GgufFile, fields: Fields, config: Config) -> dict[str, object]:
    sizes = read_state_space(file, fields)
    return {
        "layers_block_type": _read_kinds(fields, config, "mlp"),
        "mamba_num_heads": sizes.heads,
        "mamba_head_dim": sizes.head_dim,
        "ssm_state_size": sizes.state_dim,
        "n_groups": sizes.groups,
        "conv_kernel": sizes.taps,
        "use_conv_bias": sizes.conv_bias,
        "layer_norm_epsilon": config["rms_norm_eps"],
        "mlp_hidden_act": "relu2",
        "mlp_bias": any(name.endswith(_BLOCK_BIASES) for name in file.tensors),
    }


def _read_kinds(fields: Fields, config: Config, block: str) -> list[str]:
    """Kind of each layer: attention has KV heads, a feed-forward block an inner size, and a recurrence neither."""
    num_layers = config["num_hidden_layers"]
    assert isinstance(num_layers, int)
    heads, widths = fields.get("attention.head_count_kv"), fields.get("feed_forward_length")
    if not isinstance(heads, list) or not isinstance(widths, list):
        raise fields.wrong("attention.head_count_kv", "a list, as feed_forward_length, with 0 for layers without heads")
    pairs = list(zip(heads, widths, strict=True))[:num_layers]
    if any(kv_heads and width for kv_heads, width in pairs):
        raise fields.unsupported("feed_forward_length", "0 for layers with heads of k and v")
    return ["attention" if kv_heads else block if width else "mamba" for kv_heads, width in pairs]


def _read_experts(file: GgufFile, fields: Fields, config: Config) -> dict[str, object]:
    fields.only("expert_gating_func", (SIGMOID,), f"{SIGMOID} (sigmoid)")
    width = fields.count("expert_feed_forward_length", high=1 << 20)
    groups = fields.count("expert_group_count", 1, high=1 << 12)
    return _read(file, fields, config) | {
        "layers_block_type": _read_kinds(fields, config, "moe"),
        "n_routed_experts": fields.count("expert_count", high=1 << 12),
        "num_experts_per_tok": fields.count("expert_used_count", high=1 << 12),
        "moe_intermediate_size": width,
        "moe_shared_expert_intermediate_size": fields.count("expert_shared_feed_forward_length", high=1 << 20),
        "moe_latent_size": fields.optional_count("moe_latent_size", high=1 << 20),
        "n_shared_experts": fields.count("expert_shared_count", 1, high=1),
        "n_group": groups,
        "topk_group": fields.count("expert_group_used_count", 1, high=groups),
        "norm_topk_prob": fields.flag("expert_weights_norm", True),
        "routed_scaling_factor": as_written(fields.number("expert_weights_scale", 1.0)),
    }


NEMOTRON_H = Architecture(
    "nemotron_h",
    "NemotronHForCausalLM",
    _INNER,
    _read,
    outer=_OUTER,
    layers="backbone.layers",
    activation=("mamba_hidden_act", "silu"),
    is_hybrid=True,
)
NEMOTRON_H_MOE = replace(NEMOTRON_H, inner=_INNER | _EXPERTS, read=_read_experts, has_mtp=True)
