"""Every key of a configuration that transformers' model of a family reads is read here too, or known."""

import os
import sys
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from tandem.architecture.families.base import HARMLESS, REFUSED
from tandem.architecture.families.experts import TRAINING_KEYS
from tandem.architecture.fields import Fields
from tandem.architecture.registry import find_family

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text", "mixtral", "qwen3_moe")
READING = ("modeling_rope_utils.py", "masking_utils.py", "cache_utils.py")
NO_KEYS = {"get_text_config"}
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
        plain = self._kind.__getattribute__

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


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_whatever_transformers_reads_is_read_or_known(model_type: str) -> None:
    config = AutoConfig.for_model(model_type, **SIZES)
    config._attn_implementation = "eager"
    with Recorder(type(config)) as recorder:
        model = AutoModelForCausalLM.from_config(config).eval()
        model.generate(torch.ones(1, 20, dtype=torch.long), max_new_tokens=3, do_sample=False)
    fields = Fields(config.to_dict(), "config.json")
    find_family(fields).read_model(fields)
    assert {"hidden_size", "num_attention_heads", "rms_norm_eps"} <= recorder.names
    known = HARMLESS | REFUSED | set(TRAINING_KEYS) | NO_KEYS
    assert {name for name in recorder.names - known if not fields.was_read(name)} == set()
