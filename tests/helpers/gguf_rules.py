"""Rules of llama.cpp's converter for each architecture: keys that it writes beside the usual ones, and tensors that it
renames, reorders or changes.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
Tensors = dict[str, Array]
Config = Mapping[str, Any]

_EXPERT = re.compile(r"(.*)\.experts\.(\d+)\.(\w+)\.weight")


@dataclass(frozen=True)
class Rules:
    """Args:
    name: of the architecture in GGUF.
    change: of the checkpoint's tensors, under names that the package `gguf` knows.
    keys: below the architecture's name; values of None are left out.
    """

    name: str
    change: Callable[[Tensors, Config], Tensors] = lambda tensors, config: tensors
    keys: Callable[[Config], dict[str, Any]] = lambda config: {}


def in_pairs(tensors: Tensors, config: Config) -> Tensors:
    """q and k with the rows that turn together beside each other, as Llama's original checkpoints had them."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}

    def changed(name: str, tensor: Array) -> Array:
        part = name.split(".")[-2]
        if part not in heads:
            return tensor
        halves = tensor.reshape(heads[part], 2, -1, *tensor.shape[1:])
        return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(tensor.shape)

    return {name: changed(name, tensor) for name, tensor in tensors.items()}


def stacked(tensors: Tensors, config: Config) -> Tensors:
    """The experts of a layer as one tensor for each of their maps."""
    stacks: dict[str, dict[int, Array]] = defaultdict(dict)
    others = {}
    for name, tensor in tensors.items():
        found = _EXPERT.fullmatch(name)
        if found is None:
            others[name] = tensor.reshape(-1) if name.endswith("shared_expert_gate.weight") else tensor
            continue
        layer = found[1].removeprefix("model.").removesuffix(".block_sparse_moe")
        prefix = found[1] if layer.endswith(".mlp") else f"{layer}.feed_forward"
        stacks[f"{prefix}.experts.{found[3]}.weight"][int(found[2])] = tensor
    return others | {name: np.stack([parts[i] for i in range(len(parts))]) for name, parts in stacks.items()}


def _taken_apart(tensors: Tensors, config: Config) -> Tensors:
    """gpt-oss' gate and up, which take turns in the columns of stacks that are transposed."""
    return dict(_gpt_oss_tensors(tensors))


def _gpt_oss_tensors(tensors: Tensors) -> Iterator[tuple[str, Array]]:
    for name, tensor in tensors.items():
        prefix, _, last = name.rpartition(".")
        suffix = "bias" if last.endswith("_bias") else "weight"
        values = tensor.swapaxes(1, 2) if last in ("gate_up_proj", "down_proj") else tensor
        if last.startswith("gate_up_proj"):
            yield f"{prefix}.gate_proj.{suffix}", np.ascontiguousarray(values[:, 0::2])
            yield f"{prefix}.up_proj.{suffix}", np.ascontiguousarray(values[:, 1::2])
        elif last.startswith("down_proj"):
            yield f"{prefix}.down_proj.{suffix}", np.ascontiguousarray(values)
        else:
            yield f"{name}.weight" if last == "sinks" else name, tensor


def _experts(config: Config) -> dict[str, Any]:
    return {
        "expert_count": config.get("num_experts") or config["num_local_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "expert_feed_forward_length": config.get("moe_intermediate_size"),
        "expert_shared_feed_forward_length": config.get("shared_expert_intermediate_size"),
    }


def _gpt_oss(config: Config) -> dict[str, Any]:
    width, window = config["intermediate_size"], config["sliding_window"]
    return _experts(config) | {"expert_feed_forward_length": width, "attention.sliding_window": window}


def plus_one(tensors: Tensors, config: Config) -> Tensors:
    return {
        name: tensor + np.float32(1) if name.endswith("norm.weight") else tensor for name, tensor in tensors.items()
    }


def _gemma2(config: Config) -> dict[str, Any]:
    return {
        "attention.sliding_window": config["sliding_window"],
        "attn_logit_softcapping": config["attn_logit_softcapping"],
        "final_logit_softcapping": config["final_logit_softcapping"],
    }


def _gemma3(config: Config) -> dict[str, Any]:
    return {
        "attention.sliding_window": config["sliding_window"],
        "rope.freq_base_swa": config["rope_parameters"]["sliding_attention"]["rope_theta"],
        "final_logit_softcapping": config.get("final_logit_softcapping"),
    }


def _phi3(config: Config) -> dict[str, Any]:
    rope, head_dim = config["rope_parameters"], config["hidden_size"] // config["num_attention_heads"]
    keys: dict[str, Any] = {
        "attention.key_length": None,
        "attention.sliding_window": config["sliding_window"] or 0,
        "rope.dimension_count": int(rope.get("partial_rotary_factor", 1.0) * head_dim),
        "rope.scaling.original_context_length": config["original_max_position_embeddings"],
    }
    if rope["rope_type"] == "longrope":
        length, original = config["max_position_embeddings"], config["original_max_position_embeddings"]
        keys["rope.scaling.attn_factor"] = math.sqrt(1 + math.log(length / original) / math.log(original))
    return keys


def _granite(config: Config) -> dict[str, Any]:
    return {
        "attention.scale": config["attention_multiplier"],
        "embedding_scale": config["embedding_multiplier"],
        "residual_scale": config["residual_multiplier"],
        "logit_scale": config["logits_scaling"],
    }


def _squeezed(tensors: Tensors, config: Config) -> Tensors:
    return {name: values[:, 0] if ".conv" in name and values.ndim == 3 else values for name, values in tensors.items()}


def _kv_heads(config: Config) -> list[int]:
    return [
        config["num_key_value_heads"] if kind in ("full_attention", "attention") else 0
        for kind in config["layer_types"]
    ]


def lfm2(config: Config) -> dict[str, Any]:
    return {
        "attention.head_count_kv": _kv_heads(config),
        "attention.layer_norm_rms_epsilon": config["norm_eps"],
        "shortconv.l_cache": config["conv_L_cache"],
    }


def state_space(name: str, values: Array, num_groups: int) -> tuple[str, Array]:
    """Name for the package `gguf` and converted values of a tensor of Mamba-2 or of a gated DeltaNet."""
    if name.endswith(".A_log"):
        return name, -np.exp(values)[:, None]
    if name.endswith(".D"):
        return name, values[:, None]
    if name.endswith(".dt_bias"):
        return f"{name.removesuffix('.dt_bias')}.dt_proj.bias", values
    if name.endswith(".mamba.norm.weight"):
        return name, values.reshape(num_groups, -1)
    return name, values[:, 0] if name.endswith("conv1d.weight") else values


def _granite_tensors(tensors: Tensors, config: Config) -> Tensors:
    """Halves of the fused gate and up, under GGUF's names, which the package knows as such."""
    found: Tensors = {}
    for name, values in in_pairs(tensors, config).items():
        last = name.removesuffix(".weight").rpartition(".")[2]
        if last == "input_linear":
            layer, suffix = name.split(".")[2], "exps" if "sparse" in name else "shexp"
            gate, up = np.split(values, 2, axis=-2)
            found |= {f"blk.{layer}.ffn_gate_{suffix}.weight": gate, f"blk.{layer}.ffn_up_{suffix}.weight": up}
        else:
            theirs, changed = state_space(name, values, config.get("mamba_n_groups", 1))
            found[theirs] = changed
    if config["num_local_experts"]:
        return found
    plain = {"_shexp": "", "shared_mlp.output_linear": "mlp.down_proj"}
    return {_replaced(name, plain): values for name, values in found.items()}


def _replaced(name: str, parts: dict[str, str]) -> str:
    for old, new in parts.items():
        name = name.replace(old, new)
    return name


def _granite_experts(config: Config) -> dict[str, Any]:
    return _granite(config) | {
        "expert_count": config["num_local_experts"],
        "expert_used_count": config["num_experts_per_tok"],
    }


def _granite_hybrid(config: Config) -> dict[str, Any]:
    return _granite(config) | {
        "attention.head_count_kv": _kv_heads(config),
        "expert_count": config["num_local_experts"],
        "expert_used_count": config["num_experts_per_tok"],
        "expert_shared_feed_forward_length": config["shared_intermediate_size"],
        "rope.scaling.finetuned": False,
        "ssm.conv_kernel": config["mamba_d_conv"],
        "ssm.state_size": config["mamba_d_state"],
        "ssm.group_count": config["mamba_n_groups"],
        "ssm.inner_size": config["mamba_expand"] * config["hidden_size"],
        "ssm.time_step_rank": config["mamba_n_heads"],
    }


def _qwen_next_tensors(tensors: Tensors, config: Config) -> Tensors:
    groups = config["linear_num_key_heads"]
    key = config["linear_key_head_dim"]
    value = config["linear_num_value_heads"] // groups * config["linear_value_head_dim"]
    found: Tensors = {}
    for name, values in stacked(tensors, config).items():
        if name.endswith("in_proj_qkvz.weight"):
            layer, hidden = name.split(".")[2], values.shape[1]
            parts = np.split(values.reshape(groups, -1, hidden), np.cumsum([key, key, value]), axis=1)
            q, k, v, z = (part.reshape(-1, hidden) for part in parts)
            found |= {f"blk.{layer}.attn_qkv.weight": np.concatenate([q, k, v]), f"blk.{layer}.attn_gate.weight": z}
            continue
        shifted = name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight")
        theirs, changed = state_space(name, values + np.float32(1) if shifted else values, groups)
        found[theirs] = changed
    return found


def _qwen_next(config: Config) -> dict[str, Any]:
    heads, share = config["linear_num_value_heads"], config["rope_parameters"].get("partial_rotary_factor", 0.25)
    return _experts(config) | {
        "rope.dimension_count": int(config["head_dim"] * share),
        "full_attention_interval": config["layer_types"].index("full_attention") + 1,
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": config["linear_num_key_heads"],
        "ssm.inner_size": heads * config["linear_value_head_dim"],
        "ssm.time_step_rank": heads,
    }


RULES = {
    "llama": Rules("llama", in_pairs),
    "qwen2": Rules("qwen2"),
    "qwen3": Rules("qwen3"),
    "mixtral": Rules("llama", lambda tensors, config: stacked(in_pairs(tensors, config), config), _experts),
    "qwen2_moe": Rules("qwen2moe", stacked, _experts),
    "qwen3_moe": Rules("qwen3moe", stacked, _experts),
    "gpt_oss": Rules("gpt-oss", _taken_apart, _gpt_oss),
    "gemma2": Rules("gemma2", plus_one, _gemma2),
    "gemma3_text": Rules("gemma3", plus_one, _gemma3),
    "phi3": Rules("phi3", keys=_phi3),
    "granite": Rules("granite", in_pairs, _granite),
    "olmo2": Rules("olmo2"),
    "smollm3": Rules("smollm3", in_pairs),
    "lfm2": Rules("lfm2", _squeezed, lfm2),
    "granitemoe": Rules("granitemoe", _granite_tensors, _granite_experts),
    "granitemoehybrid": Rules("granitehybrid", _granite_tensors, _granite_hybrid),
    "qwen3_next": Rules("qwen3next", _qwen_next_tensors, _qwen_next),
}
