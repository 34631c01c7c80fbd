"""Every key of a configuration that transformers' model of a family reads is read here too, or known."""

import os
import sys
from collections.abc import Collection
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForImageTextToText

from tandem.architecture.families.backbone import UNUSED_KEYS as BACKBONE_KEYS
from tandem.architecture.families.base import HARMLESS, REFUSED
from tandem.architecture.families.experts import TRAINING_KEYS
from tandem.architecture.families.gemma3_conditional import OTHER_PARTS_KEYS as GEMMA3_OTHER_PARTS_KEYS
from tandem.architecture.families.gemma4_conditional import OTHER_PARTS_KEYS as GEMMA4_OTHER_PARTS_KEYS
from tandem.architecture.families.jamba import KERNEL_KEYS
from tandem.architecture.families.minimax_m3_conditional import OTHER_PARTS_KEYS as MINIMAX_M3_OTHER_PARTS_KEYS
from tandem.architecture.families.mistral3_conditional import OTHER_PARTS_KEYS as MISTRAL3_OTHER_PARTS_KEYS
from tandem.architecture.families.phi3 import DROPOUT_KEYS
from tandem.architecture.families.qwen3_5_conditional import OTHER_PARTS_KEYS as QWEN3_5_OTHER_PARTS_KEYS
from tandem.architecture.families.state_space import CHUNK_KEYS
from tandem.architecture.fields import Fields
from tandem.architecture.registry import ARCHITECTURES, find_family
from tests.helpers.random_models import oracle_class
from tests.helpers.sparse_checkpoints import OWN_ARCHITECTURES

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
V4 = {
    "num_key_value_heads": 1,
    "head_dim": 16,
    "q_lora_rank": 16,
    "o_groups": 2,
    "o_lora_rank": 16,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "intermediate_size": 16,
}
HYBRID = ["conv", "full_attention", "conv"]
DELTA = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
SHARED = {"shared_expert_intermediate_size": 16}
GEMMA4_TYPES = ["sliding_attention", "full_attention", "full_attention"]
MODEL_TYPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
    "gemma2": {},
    "gemma3_text": {},
    "gemma4_text": {"vocab_size_per_layer_input": 64, "num_kv_shared_layers": 1, "layer_types": GEMMA4_TYPES},
    "olmo2": {},
    "olmo3": {},
    "phi3": {"pad_token_id": 0},
    "smollm3": {"pad_token_id": 0},
    "granite": {},
    "ministral3": {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.1}},
    "mixtral": {},
    "qwen2_moe": EXPERTS | SHARED,
    "qwen3_moe": {},
    "deepseek_v2": LATENT | {"n_group": 1, "topk_group": 1},
    "deepseek_v3": LATENT | {"n_group": 2, "topk_group": 1},
    "deepseek_v32": LATENT | {"n_group": 2, "topk_group": 1},
    "deepseek_v4": V4,
    "glm_moe_dsa": LATENT,
    "glm4_moe_lite": LATENT,
    "mistral4": LATENT | {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.1}},
    "glm4_moe": {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "index_n_heads": 2,
        "index_head_dim": 16,
        "index_block_size": 4,
        "index_topk_blocks": 2,
        "head_dim": 16,
        "rotary_dim": 16,
    },
    "lfm2": {"layer_types": HYBRID},
    "lfm2_moe": EXPERTS | {"layer_types": HYBRID, "num_dense_layers": 1},
    "granitemoe": {"num_local_experts": 4},
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "mamba_n_heads": 4,
        "num_local_experts": 4,
    },
    "jamba": {"num_experts": 4, "attn_layer_period": 3, "attn_layer_offset": 1},
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 2},
    "nemotron_h": {"n_groups": 2, "mamba_num_heads": 4},
    "falcon_h1": {"mamba_n_heads": 4, "mamba_d_ssm": 32},
    "qwen3_next": DELTA | EXPERTS | SHARED,
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": DELTA | EXPERTS | SHARED,
    "kimi_linear": DELTA | EXPERTS | {"num_key_value_heads": 4, "pad_token_id": 0},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": YARN},
}
"""The kinds of text model that are served, each with what it needs beside the sizes to be a small one."""

WRAPPERS = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "minimax_m3_vl": "minimax_m3_vl_text",
    "mistral3": "ministral3",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
"""Multimodal models that are served, and the kind of the text model in each."""

VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "patch_size": 8}
READING = ("modeling_rope_utils.py", "masking_utils.py", "cache_utils.py")
NO_KEYS = {
    *("get_text_config", "nested_rope_parameter_keys", "standardize_rope_params"),  # methods
    *("default_rope_type", "_rope_type_labels"),  # constants of the configuration's class
    *("layers_num_experts", "number_of_conv_states", "_is_quantized"),  # what Jamba derives, or asks of the object
    "layers_block_type",  # another name of `layer_types`, in the object and not in a file that has both
}
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


class Recorder:
    """Names of a configuration's attributes that code of models, ropes, masks and caches reads."""

    def __init__(self, kind: type) -> None:
        self.names: set[str] = set()
        self._root = os.path.dirname(transformers.__file__)
        self._kind = kind

    def __enter__(self) -> "Recorder":
        plain: Any = self._kind.__getattribute__

        def recording(config: object, name: str) -> object:
            file = os.path.relpath(sys._getframe(1).f_code.co_filename, self._root)
            is_model = file.startswith("models/") and "/auto/" not in file
            if (is_model or file in READING) and not name.startswith("__"):
                self.names.add(name)
            return plain(config, name)

        self._kind.__getattribute__ = recording  # type: ignore[method-assign,assignment]
        return self

    def __exit__(self, *_: object) -> None:
        del self._kind.__getattribute__


def generate(auto: Any, config: Any) -> None:
    """Three tokens of text of a random model."""
    config._attn_implementation = "eager"
    build = getattr(auto, "from_config", None) or auto._from_config
    model = build(config).eval()
    model.generate(torch.ones(1, 20, dtype=torch.long), max_new_tokens=3, do_sample=False)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_whatever_transformers_reads_is_read_or_known(model_type: str) -> None:
    config = AutoConfig.for_model(model_type, **SIZES | MODEL_TYPES[model_type])
    with Recorder(type(config)) as recorder:
        generate(oracle_class(model_type), config)
    fields = Fields(config.to_dict(), "config.json")
    find_family(fields).read_model(fields)
    assert "hidden_size" in recorder.names
    assert recorder.names & {"num_attention_heads", "num_heads"}
    assert recorder.names & {"rms_norm_eps", "norm_eps", "layer_norm_epsilon"}
    assert unknown(recorder, fields, TRAINING_KEYS, DROPOUT_KEYS, CHUNK_KEYS, BACKBONE_KEYS, KERNEL_KEYS) == set()


def test_every_text_model_that_is_served_is_among_them() -> None:
    texts = {entry.model_type for entry in ARCHITECTURES.values()} - {*WRAPPERS, *OWN_ARCHITECTURES.values()}
    assert texts == set(MODEL_TYPES)


@pytest.mark.parametrize("model_type", WRAPPERS)
def test_whatever_transformers_reads_of_a_wrapper_is_read_or_known(model_type: str) -> None:
    """Of the outer object, while text is generated; its text model is among those above."""
    text = SIZES | {"model_type": WRAPPERS[model_type], **MODEL_TYPES[WRAPPERS[model_type]]}
    config = AutoConfig.for_model(model_type, text_config=text, vision_config=VISION, image_token_index=5)
    with Recorder(type(config)) as recorder:
        generate(AutoModelForImageTextToText, config)
    fields = Fields(config.to_dict(), "config.json")
    find_family(fields).read_model(fields)
    assert {"text_config", "vision_config"} <= recorder.names
    others = (
        GEMMA3_OTHER_PARTS_KEYS,
        GEMMA4_OTHER_PARTS_KEYS,
        MISTRAL3_OTHER_PARTS_KEYS,
        QWEN3_5_OTHER_PARTS_KEYS,
        MINIMAX_M3_OTHER_PARTS_KEYS,
    )
    assert unknown(recorder, fields, *others) == set()


def unknown(recorder: Recorder, fields: Fields, *harmless: Collection[str]) -> set[str]:
    """Names that transformers read and neither the family nor any of the lists knows."""
    known = HARMLESS.union(REFUSED, NO_KEYS, *harmless)
    return {name for name in recorder.names - known if not fields.was_read(name)}
