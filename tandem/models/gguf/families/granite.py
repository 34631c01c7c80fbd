"""Rows of the table `architectures` for GGUF's Granite 3 (Llama with four constant factors), its mixtures of experts,
and Granite 4 (mostly Mamba-2).
"""

from tandem.architecture.fields import Fields
from tandem.models.gguf.families.base import (
    ATTENTION_WITH_PAIRED_ROWS,
    GATED,
    PRE_NORMS,
    Architecture,
    Config,
    TargetTensor,
    have_attention,
    required,
)
from tandem.models.gguf.families.state_space import read_state_space, state_space
from tandem.models.gguf.file import GgufFile

_MULTIPLIERS = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
_HAS_ROPE = "rope.scaling.finetuned"  # NOTE: so these files say whether anything is rotated
_BLOCK = {
    "ffn_gate": TargetTensor("shared_mlp.gate_proj"),
    "ffn_up": TargetTensor("shared_mlp.up_proj"),
    "ffn_down": TargetTensor("shared_mlp.output_linear"),
}
_EXPERTS = {
    "ffn_gate_inp": TargetTensor("block_sparse_moe.router.layer"),
    "ffn_gate_exps": TargetTensor("block_sparse_moe.{}.gate_proj"),
    "ffn_up_exps": TargetTensor("block_sparse_moe.{}.up_proj"),
    "ffn_down_exps": TargetTensor("block_sparse_moe.{}.output_linear"),
}
_SHARED_BLOCK = {f"{name}_shexp": target for name, target in _BLOCK.items()}


def _read_multipliers(fields: Fields) -> dict[str, object]:
    return {ours: required(fields, theirs) for theirs, ours in _MULTIPLIERS.items()}


def _read(file: GgufFile, fields: Fields, config: Config) -> dict[str, object]:
    fields.only(_HAS_ROPE, (True,), "true (false = no rotary embedding)")
    return _read_multipliers(fields)


def _read_hybrid(file: GgufFile, fields: Fields, config: Config) -> dict[str, object]:
    sizes, hidden = read_state_space(file, fields), config["hidden_size"]
    assert isinstance(hidden, int)
    if sizes.inner % hidden:
        raise fields.wrong("ssm.inner_size", f"a multiple of embedding_length={hidden}")
    attends = have_attention(fields, config)
    return _read_multipliers(fields) | {
        "layer_types": ["attention" if has_heads else "mamba" for has_heads in attends],
        "position_embedding_type": "rope" if fields.flag(_HAS_ROPE, True) else "nope",
        "mamba_n_heads": sizes.heads,
        "mamba_d_head": sizes.head_dim,
        "mamba_expand": sizes.inner // hidden,
        "mamba_n_groups": sizes.groups,
        "mamba_d_state": sizes.state_dim,
        "mamba_d_conv": sizes.taps,
        "mamba_conv_bias": sizes.conv_bias,
        "shared_intermediate_size": fields.count("expert_shared_feed_forward_length", high=1 << 20),
        "num_local_experts": fields.count("expert_count", 0, low=0, high=1 << 12),
        "num_experts_per_tok": fields.count("expert_used_count", 0, low=0, high=1 << 12),
    }


def _read_experts(file: GgufFile, fields: Fields, config: Config) -> dict[str, object]:
    """Experts of every layer, each with the inner size given for the layer."""
    width, num_experts = config["intermediate_size"], fields.count("expert_count", high=1 << 12)
    fields.only("expert_feed_forward_length", (width,), f"as feed_forward_length, {width}")
    return _read(file, fields, config) | {
        "num_local_experts": num_experts,
        "num_experts_per_tok": fields.count("expert_used_count", high=num_experts),
    }


_INNER = PRE_NORMS | ATTENTION_WITH_PAIRED_ROWS | state_space("mamba")
_CLASS = "GraniteMoeHybridForCausalLM"
GRANITE = Architecture(
    "granite", "GraniteForCausalLM", PRE_NORMS | ATTENTION_WITH_PAIRED_ROWS | GATED, _read, has_bias_option=True
)
GRANITE_MOE = Architecture(
    "granitemoe",
    "GraniteMoeForCausalLM",
    PRE_NORMS | ATTENTION_WITH_PAIRED_ROWS | _EXPERTS,
    _read_experts,
    has_bias_option=True,
)
GRANITE_HYBRID = Architecture(
    "granitemoehybrid",
    _CLASS,
    _INNER | _BLOCK,
    _read_hybrid,
    with_experts=Architecture(
        "granitemoehybrid", _CLASS, _INNER | _EXPERTS | _SHARED_BLOCK, _read_hybrid, is_hybrid=True
    ),
    is_hybrid=True,
)
