"""Rules of llama.cpp's converter for hybrids, latents and experts in groups; see `gguf_rules`."""

from dataclasses import replace
from typing import Any

import numpy as np

from tests.helpers.gguf_rules import (
    RULES,
    Array,
    Config,
    Rules,
    Tensors,
    in_pairs,
    lfm2,
    plus_one,
    stacked,
    state_space,
)

_SIGMOID = 2


def _correction(tensors: Tensors, config: Config) -> Tensors:
    """Stacks, and the routers' corrections, which are called biases."""
    return {
        name.replace("e_score_correction_bias", "e_score_correction.bias"): values
        for name, values in stacked(tensors, config).items()
    }


def _experts(config: Config) -> dict[str, Any]:
    return {
        "expert_count": config["n_routed_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_group_count": config["n_group"],
        "expert_group_used_count": config["topk_group"],
        "expert_weights_scale": config["routed_scaling_factor"],
        "expert_weights_norm": config["norm_topk_prob"] or None,
        "leading_dense_block_count": config.get("first_k_dense_replace"),
    }


def _lfm2_experts(tensors: Tensors, config: Config) -> Tensors:
    """Stacks under the names of their maps, and the routers' corrections, which are called biases."""
    names = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
    stacks: dict[str, list[Array]] = {}
    found: Tensors = {}
    for name, values in sorted(tensors.items()):  # NOTE: fewer than ten experts
        prefix, is_expert, last = name.partition(".experts.")
        if is_expert:
            _, part, _ = last.split(".")
            stacks.setdefault(f"{prefix}.experts.{names[part]}.weight", []).append(values)
        else:
            found[name.replace("expert_bias", "expert_bias.bias")] = values[:, 0] if values.ndim == 3 else values
    return found | {name: np.stack(parts) for name, parts in stacks.items()}


def _lfm2_moe(config: Config) -> dict[str, Any]:
    return lfm2(config) | {
        "expert_count": config["num_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "leading_dense_block_count": config["num_dense_layers"],
        "expert_gating_func": _SIGMOID,
    }


def _rotary(config: Config, share: float) -> int:
    return int(config["head_dim"] * config["rope_parameters"].get("partial_rotary_factor", share))


def _glm(config: Config) -> dict[str, Any]:
    return _experts(config) | {"expert_gating_func": _SIGMOID, "rope.dimension_count": _rotary(config, 0.5)}


def _minimax(config: Config) -> dict[str, Any]:
    return {
        "expert_count": config["num_local_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "expert_feed_forward_length": config["intermediate_size"],
        "expert_gating_func": _SIGMOID,
        "rope.dimension_count": _rotary(config, 1.0),
    }


def _latent_tensors(tensors: Tensors, config: Config) -> Tensors:
    """The map from latents in two parts, of which that to keys is transposed."""
    found: Tensors = {}
    for name, values in _correction(tensors, config).items():
        if not name.endswith("kv_b_proj.weight"):
            found[name] = values
            continue
        heads, key = config["num_attention_heads"], config["qk_nope_head_dim"]
        whole = values.reshape(heads, key + config["v_head_dim"], -1)
        found[name.replace("kv_b", "k_b")] = np.ascontiguousarray(whole[:, :key].swapaxes(1, 2))
        found[name.replace("kv_b", "v_b")] = np.ascontiguousarray(whole[:, key:])
    return found


def _latents(config: Config) -> dict[str, Any]:
    rank, rotary = config["kv_lora_rank"], config["qk_rope_head_dim"]
    return {
        "attention.head_count_kv": 1,
        "attention.q_lora_rank": config["q_lora_rank"],
        "attention.kv_lora_rank": rank,
        "attention.key_length": rank + rotary,
        "attention.value_length": rank,
        "attention.key_length_mla": config["qk_nope_head_dim"] + rotary,
        "attention.value_length_mla": config["v_head_dim"],
        "rope.dimension_count": rotary,
    }


def _deepseek(config: Config) -> dict[str, Any]:
    found = _experts(config) | _latents(config)
    share = config["rope_parameters"].get("mscale_all_dim")
    if share is not None:
        found["rope.scaling.yarn_log_multiplier"] = 0.1 * share
    return found


def _deepseek3(config: Config) -> dict[str, Any]:
    return _deepseek(config) | {"expert_gating_func": _SIGMOID}


def _kimi_tensors(tensors: Tensors, config: Config) -> Tensors:
    found: Tensors = {}
    for name, values in _latent_tensors(tensors, config).items():
        if name.endswith("_conv1d.weight"):
            found[name] = values.reshape(1, len(values), 1, -1)
        elif name.endswith(".A_log"):
            found[name] = -np.exp(values)
        elif name.endswith(".dt_bias"):
            found[f"{name.removesuffix('.dt_bias')}.dt_proj.bias"] = values
        else:
            dense = ".block_sparse_moe." in name and name.split(".")[-2] in ("gate_proj", "up_proj", "down_proj")
            found[name.replace("block_sparse_moe", "mlp") if dense and "shared" not in name else name] = values
    return found


def _kimi(config: Config) -> dict[str, Any]:
    return _latents(config) | {
        "context_length": config["model_max_length"],
        "attention.head_count_kv": [int(kind == "full_attention") for kind in config["layer_types"]],
        "attention.value_length": None,
        "kda.head_dim": config["linear_head_dim"],
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "expert_count": config["num_experts"],
        "expert_used_count": config["num_experts_per_token"],
        "expert_gating_func": _SIGMOID,
        "expert_group_used_count": config["topk_group"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_count": config["num_shared_experts"],
        "expert_weights_scale": config["routed_scaling_factor"],
        "leading_dense_block_count": config["mlp_layer_types"].count("dense"),
    }


def _falcon_tensors(tensors: Tensors, config: Config) -> Tensors:
    """Weights that have the multipliers."""
    into, inner = config["attention_in_multiplier"], config["mamba_d_ssm"]
    group = config["mamba_n_groups"] * config["mamba_d_state"]
    sizes = (inner, inner, group, group, config["mamba_n_heads"])
    scales = {
        "down_proj": config["mlp_multipliers"][1],
        "gate_proj": config["mlp_multipliers"][0],
        "k_proj": config["key_multiplier"] * into,
        "q_proj": into,
        "v_proj": into,
        "o_proj": config["attention_out_multiplier"],
        "out_proj": config["ssm_out_multiplier"],
        "in_proj": config["ssm_in_multiplier"] * np.repeat(config["ssm_multipliers"], sizes)[:, None],
        "lm_head": config["lm_head_multiplier"],
        "embed_tokens": config["embedding_multiplier"],
    }
    return dict(
        state_space(name, (values * scales.get(name.split(".")[-2], 1.0)).astype(np.float32), config["mamba_n_groups"])
        for name, values in tensors.items()
    )


def _falcon(config: Config) -> dict[str, Any]:
    return {
        "attention.value_length": config["head_dim"],
        "vocab_size": config["vocab_size"],
        "ssm.conv_kernel": config["mamba_d_conv"],
        "ssm.state_size": config["mamba_d_state"],
        "ssm.group_count": config["mamba_n_groups"],
        "ssm.inner_size": config["mamba_d_ssm"],
        "ssm.time_step_rank": config["mamba_n_heads"],
    }


def _nemotron_tensors(tensors: Tensors, config: Config) -> Tensors:
    renamed = {name.replace(".mixer.experts.", ".mlp.experts."): values for name, values in tensors.items()}
    found: Tensors = {}
    for name, values in _correction(in_pairs(renamed, config), config).items():
        changed_name, changed = state_space(name, values, config["n_groups"])
        if name.endswith("mixer.norm.weight"):
            changed = values.reshape(config["n_groups"], -1)
        found[changed_name.replace("backbone.layers", "model.layers") if ".mlp." in name else changed_name] = changed
    return found


def _nemotron(config: Config) -> dict[str, Any]:
    kinds = config["layers_block_type"]
    has_experts = "moe" in kinds
    width = config["moe_intermediate_size"] if has_experts else config["intermediate_size"]
    keys = {
        "block_count": len(kinds),
        "attention.head_count_kv": [config["num_key_value_heads"] * (kind == "full_attention") for kind in kinds],
        "attention.layer_norm_rms_epsilon": config["layer_norm_epsilon"],
        "feed_forward_length": [width if kind in ("moe", "mlp") else 0 for kind in kinds],
        "ssm.conv_kernel": config["conv_kernel"],
        "ssm.state_size": config["ssm_state_size"],
        "ssm.group_count": config["n_groups"],
        "ssm.inner_size": config["mamba_num_heads"] * config["mamba_head_dim"],
        "ssm.time_step_rank": config["mamba_num_heads"],
        "rope.scaling.finetuned": False,
    }
    if not has_experts:
        return keys
    return (
        keys
        | _experts(config)
        | {
            "expert_shared_feed_forward_length": config["moe_shared_expert_intermediate_size"],
            "moe_latent_size": config.get("moe_latent_size"),
        }
    )


def _tiled(tensors: Tensors, config: Config) -> Tensors:
    """Value heads by their number within a group, then by group, as far as Qwen3.5's converter goes."""
    groups, heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
    before = 2 * groups * config["linear_key_head_dim"]

    def by_number(values: Array, start: int = 0) -> Array:
        rows = values[start:].reshape(groups, heads // groups, -1, *values.shape[1:]).swapaxes(0, 1)
        return np.concatenate([values[:start], rows.reshape(-1, *values.shape[1:])])

    found: Tensors = {}
    for name, values in stacked(tensors, config).items():
        last = name.removesuffix(".weight").rpartition(".")[2]
        changed = values
        if ".linear_attn." in name and last in ("in_proj_qkv", "conv1d"):
            changed = by_number(values, before)
        elif ".linear_attn." in name and last in ("in_proj_z", "in_proj_a", "in_proj_b", "A_log", "dt_bias"):
            changed = by_number(values)
        elif ".linear_attn." in name and last == "out_proj":
            changed = np.ascontiguousarray(by_number(values.T).T)
        theirs, changed = state_space(name, changed, groups)
        found[theirs] = changed.reshape(-1) if last == "A_log" else changed
    shifted = plus_one({name: values for name, values in found.items() if "linear_attn.norm" not in name}, config)
    return found | shifted


def _qwen35(config: Config) -> dict[str, Any]:
    heads = config["linear_num_value_heads"]
    return {
        "rope.dimension_count": _rotary(config, 0.25),
        "rope.dimension_sections": [1, 2, 1, 0],
        "full_attention_interval": config["layer_types"].index("full_attention") + 1,
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": config["linear_num_key_heads"],
        "ssm.inner_size": heads * config["linear_value_head_dim"],
        "ssm.time_step_rank": heads,
    }


def _qwen35_moe(config: Config) -> dict[str, Any]:
    return _qwen35(config) | {
        "feed_forward_length": None,
        "expert_count": config["num_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "expert_feed_forward_length": config["moe_intermediate_size"],
        "expert_shared_feed_forward_length": config["shared_expert_intermediate_size"],
    }


_MORE_RULES = {
    "glm4_moe": Rules("glm4moe", _correction, _glm),
    "lfm2_moe": Rules("lfm2moe", _lfm2_experts, _lfm2_moe),
    "minimax_m2": Rules("minimax-m2", _correction, _minimax),
    "deepseek_v2": Rules("deepseek2", _latent_tensors, _deepseek),
    "deepseek_v3": Rules("deepseek2", _latent_tensors, _deepseek3),
    "kimi_linear": Rules("kimi-linear", _kimi_tensors, _kimi),
    "falcon_h1": Rules("falcon-h1", _falcon_tensors, _falcon),
    "nemotron_h": Rules("nemotron_h_moe", _nemotron_tensors, _nemotron),
    "qwen3_5_text": Rules("qwen35", _tiled, _qwen35),
    "qwen3_5_moe_text": Rules("qwen35moe", _tiled, _qwen35_moe),
}


def find_rules(config: Config) -> Rules:
    """Those of a model; one of Nemotron-H without experts is another architecture of GGUF's."""
    found = (RULES | _MORE_RULES)[config["model_type"]]
    kinds = config.get("layers_block_type", ())
    return replace(found, name="nemotron_h") if kinds and "moe" not in kinds else found
