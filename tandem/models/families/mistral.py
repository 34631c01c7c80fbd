"""MistralForCausalLM: as Llama, with one sliding window for every layer (absent = 4096, null = none)."""

from dataclasses import replace

from tandem.models.config import ModelConfig
from tandem.models.families import base
from tandem.models.fields import Fields
from tandem.models.rope import flat_rope

_DEFAULTS = base.Defaults(max_positions=4096 * 32, kv_heads=8, eos_token_id=2, bos_token_id=1)
_DEFAULT_WINDOW = 4096


def _read_config(fields: Fields) -> ModelConfig:
    plain = base.read_plain("mistral", fields, _DEFAULTS)
    window = fields.optional_count("sliding_window", _DEFAULT_WINDOW)
    num_layers = base.read_layer_count(fields, _DEFAULTS)
    config = replace(plain, layers=base.uniform_layers(num_layers, flat_rope(fields, plain), window))
    base.finish(fields)
    return config


FAMILY = base.Family(_read_config)
