"""LlamaForCausalLM: Llama 2 and 3.x, and the many checkpoints that share their form."""

from dataclasses import replace

from tandem.models.config import ModelConfig
from tandem.models.families import base
from tandem.models.fields import Fields
from tandem.models.rope import flat_rope

_DEFAULTS = base.Defaults(max_positions=2048, eos_token_id=2, bos_token_id=1)


def _read_config(fields: Fields) -> ModelConfig:
    plain = base.read_plain("llama", fields, _DEFAULTS)
    attention_bias = fields.flag("attention_bias", False)
    config = replace(
        plain,
        layers=base.uniform_layers(base.read_layer_count(fields, _DEFAULTS), flat_rope(fields, plain)),
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=fields.flag("mlp_bias", False),
    )
    base.finish(fields)
    return config


FAMILY = base.Family(_read_config)
