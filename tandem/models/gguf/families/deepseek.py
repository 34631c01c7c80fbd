"""Row of the table `architectures` for GGUF's DeepSeek-V2 and V3, Kimi-K2 and GLM-4.7-Flash: latent attention, experts
by softmax or sigmoid.

Newer files have the map from latents to keys and values in two parts, and the part for keys is transposed. Its
quantised blocks then lie along the other dimension, so this map is decoded.
"""

import numpy as np

from tandem.architecture.fields import Fields
from tandem.core.errors import UnsupportedCheckpointError
from tandem.models.gguf.families.base import (
    PRE_NORMS,
    Architecture,
    Config,
    Floats,
    TargetTensor,
    TargetTensors,
    as_written,
)
from tandem.models.gguf.families.experts import GROUPED, MTP_TENSORS, SIGMOID, read_grouped_experts, read_groups
from tandem.models.gguf.file import GgufFile

_MAX_SIZE = 1 << 16  # largest accepted in a file
_LOG_SHARE = 0.1  # NOTE: files have `mscale_all_dim` times this
_CORRECTION = ".exp_probs_b.bias"


def joined(keys: Floats, values: Floats) -> Floats:
    """The map from latents to each head's key and value, [heads * (k + v), rank].

    Args:
        keys: the part for keys, transposed. # [heads, rank, k]
        values: the part for values. # [heads, v, rank]
    """
    rows = np.concatenate([keys.swapaxes(1, 2), values], axis=1)
    return rows.reshape(-1, rows.shape[-1])


LATENT: TargetTensors = {
    "attn_q": TargetTensor("self_attn.q_proj"),
    "attn_q_a": TargetTensor("self_attn.q_a_proj"),
    "attn_q_a_norm": TargetTensor("self_attn.q_a_layernorm"),
    "attn_q_b": TargetTensor("self_attn.q_b_proj"),
    "attn_kv_a_mqa": TargetTensor("self_attn.kv_a_proj_with_mqa"),
    "attn_kv_a_norm": TargetTensor("self_attn.kv_a_layernorm"),
    "attn_kv_b": TargetTensor("self_attn.kv_b_proj"),
    "attn_k_b": TargetTensor("self_attn.kv_b_proj", change=joined, others=("attn_v_b.weight",)),
    "attn_v_b": (),
    "attn_output": TargetTensor("self_attn.o_proj"),
}


def read_latents(fields: Fields, rotary_dim: object) -> dict[str, object]:
    """Sizes of latents and heads; files from before 2025 have the heads' sizes under the usual keys."""
    assert isinstance(rotary_dim, int)
    rank = fields.count("attention.kv_lora_rank", high=_MAX_SIZE)
    key_dim = fields.count("attention.key_length", low=2, high=_MAX_SIZE)
    if fields.has("attention.key_length_mla"):
        if key_dim != rank + rotary_dim:
            whole = rank + rotary_dim
            raise fields.wrong("attention.key_length", f"attention.kv_lora_rank + rope.dimension_count={whole}")
        key_dim = fields.count("attention.key_length_mla", low=2, high=_MAX_SIZE)
        value_dim = fields.count("attention.value_length_mla", high=_MAX_SIZE)
        fields.get("attention.value_length")  # NOTE: the latent's, or in Kimi-Linear's files what nothing has
    else:
        value_dim = fields.count("attention.value_length", high=_MAX_SIZE)
    if key_dim <= rotary_dim:
        raise fields.wrong("attention.key_length", f"above rope.dimension_count={rotary_dim}")
    return {
        "kv_lora_rank": rank,
        "q_lora_rank": fields.optional_count("attention.q_lora_rank", high=_MAX_SIZE),
        "qk_nope_head_dim": key_dim - rotary_dim,
        "qk_rope_head_dim": rotary_dim,
        "v_head_dim": value_dim,
    }


def _read(file: GgufFile, fields: Fields, config: Config) -> dict[str, object]:
    experts = read_grouped_experts(fields)
    has_correction = any(name.endswith(_CORRECTION) for name in file.tensors)
    gating = fields.count("expert_gating_func", SIGMOID if has_correction else 1)
    if gating not in (1, SIGMOID) or (gating == SIGMOID) != has_correction:
        raise UnsupportedCheckpointError(
            f"{file.path}: deepseek2.expert_gating_func={gating} {'with' if has_correction else 'without'} tensors "
            f"blk.*{_CORRECTION} is not served; supported: 1 (softmax) without them, {SIGMOID} (sigmoid) with them"
        )
    groups, chosen = read_groups(fields, experts["n_routed_experts"], is_sigmoid=has_correction)
    found = experts | read_latents(fields, config["head_dim"]) | _read_scaling(fields, config)
    found |= {"n_group": groups, "topk_group": chosen}
    if has_correction:
        return found | {
            "model_type": "deepseek_v3",
            "architectures": ["DeepseekV3ForCausalLM"],
            "rope_interleave": True,
        }
    return found | {"topk_method": "greedy" if groups == 1 else "group_limited_greedy"}


def _read_scaling(fields: Fields, config: Config) -> dict[str, object]:
    """YaRN's factor of the scores. NOTE: published models have the same for cosines and sines, where it cancels."""
    share, scaling = fields.optional_number("rope.scaling.yarn_log_multiplier"), config.get("rope_scaling")
    if share is None or not isinstance(scaling, dict):
        return {}
    factor = as_written(round(share / _LOG_SHARE, 6))
    return {"rope_scaling": scaling | {"mscale": factor, "mscale_all_dim": factor}}


DEEPSEEK2 = Architecture(
    "deepseek_v2",
    "DeepseekV2ForCausalLM",
    {**PRE_NORMS, **LATENT, **GROUPED, **MTP_TENSORS},
    _read,
    is_latent=True,
    mtp_key="num_nextn_predict_layers",
    has_mtp=True,
)
