"""Granite 3, as Llama with four multipliers, and Granite 4, which has Mamba-2 in most layers."""

from tandem.architecture.fields import Fields
from tandem.models.gguf.families.base import (
    GATED,
    IN_TURN,
    PRE_NORMS,
    Architecture,
    Config,
    Place,
    channelwise,
    flat,
    have_attention,
    log_of_negated,
    required,
)
from tandem.models.gguf.file import GgufFile

_MULTIPLIERS = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
_HAS_ROPE = "rope.scaling.finetuned"  # NOTE: so these files say whether anything is rotated
_STATE_SPACE = {
    "ssm_in": Place("mamba.in_proj"),
    "ssm_conv1d.weight": Place("mamba.conv1d.weight", change=channelwise),
    "ssm_conv1d.bias": Place("mamba.conv1d.bias"),
    "ssm_dt.bias": Place("mamba.dt_bias"),
    "ssm_a": Place("mamba.A_log", change=log_of_negated),
    "ssm_d": Place("mamba.D", change=flat),
    "ssm_norm": Place("mamba.norm", change=flat),
    "ssm_out": Place("mamba.out_proj"),
}
_BLOCK = {
    "ffn_gate": Place("shared_mlp.gate_proj"),
    "ffn_up": Place("shared_mlp.up_proj"),
    "ffn_down": Place("shared_mlp.output_linear"),
}
_EXPERTS = {
    "ffn_gate_inp": Place("block_sparse_moe.router.layer"),
    "ffn_gate_exps": Place("block_sparse_moe.{}.gate_proj"),
    "ffn_up_exps": Place("block_sparse_moe.{}.up_proj"),
    "ffn_down_exps": Place("block_sparse_moe.{}.output_linear"),
    **{f"{name}_shexp": place for name, place in _BLOCK.items()},
}


def _read_multipliers(fields: Fields) -> dict[str, object]:
    return {ours: required(fields, theirs) for theirs, ours in _MULTIPLIERS.items()}


def _read(file: GgufFile, fields: Fields, config: Config) -> dict[str, object]:
    fields.only(_HAS_ROPE, (True,), "true (false = no rotary embedding)")
    return _read_multipliers(fields)


def _read_hybrid(file: GgufFile, fields: Fields, config: Config) -> dict[str, object]:
    heads, inner = fields.count("ssm.time_step_rank", high=1 << 12), fields.count("ssm.inner_size", high=1 << 20)
    hidden = config["hidden_size"]
    assert isinstance(hidden, int)
    if inner % heads or inner % hidden:
        raise fields.wrong("ssm.inner_size", f"a multiple of ssm.time_step_rank={heads} and embedding_length={hidden}")
    attends = have_attention(fields, config)
    return _read_multipliers(fields) | {
        "layer_types": ["attention" if has_heads else "mamba" for has_heads in attends],
        "position_embedding_type": "rope" if fields.flag(_HAS_ROPE, True) else "nope",
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_expand": inner // hidden,
        "mamba_n_groups": fields.count("ssm.group_count", high=1 << 12),
        "mamba_d_state": fields.count("ssm.state_size", high=1 << 12),
        "mamba_d_conv": fields.count("ssm.conv_kernel", low=2, high=64),
        "mamba_conv_bias": any(name.endswith(".ssm_conv1d.bias") for name in file.tensors),
        "shared_intermediate_size": fields.count("expert_shared_feed_forward_length", high=1 << 20),
        "num_local_experts": fields.count("expert_count", 0, low=0, high=1 << 12),
        "num_experts_per_tok": fields.count("expert_used_count", 0, low=0, high=1 << 12),
    }


_INNER = PRE_NORMS | IN_TURN | _STATE_SPACE
_CLASS = "GraniteMoeHybridForCausalLM"
GRANITE = Architecture("granite", "GraniteForCausalLM", PRE_NORMS | IN_TURN | GATED, _read, has_bias_option=True)
GRANITE_HYBRID = Architecture(
    "granitemoehybrid",
    _CLASS,
    _INNER | _BLOCK,
    _read_hybrid,
    with_experts=Architecture("granitemoehybrid", _CLASS, _INNER | _EXPERTS, _read_hybrid, is_hybrid=True),
    is_hybrid=True,
)
