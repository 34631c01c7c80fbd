"""Qwen3ForCausalLM: a norm on every head of q and k, a head size of its own, windows as in Qwen 2."""

from dataclasses import replace

from tandem.models.config import ModelConfig
from tandem.models.families import base
from tandem.models.families.qwen2 import read_layers
from tandem.models.fields import Fields
from tandem.models.rope import flat_rope

_DEFAULTS = base.Defaults(max_positions=32768, kv_heads=32, head_dim=128)


def _read_config(fields: Fields) -> ModelConfig:
    plain = base.read_plain("qwen3", fields, _DEFAULTS)
    attention_bias = fields.flag("attention_bias", False)
    config = replace(
        plain,
        layers=read_layers(fields, base.read_layer_count(fields, _DEFAULTS), flat_rope(fields, plain)),
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        qk_norm=True,
    )
    base.finish(fields)
    return config


FAMILY = base.Family(_read_config)
