"""Qwen2ForCausalLM: Qwen 2 and 2.5. As Llama with biases on q, k, v, and an optional window on the upper layers."""

from dataclasses import replace

from tandem.models.config import LayerConfig, ModelConfig, RopeConfig
from tandem.models.families import base
from tandem.models.fields import Fields
from tandem.models.rope import flat_rope

_DEFAULTS = base.Defaults(max_positions=32768, kv_heads=32)
_DEFAULT_WINDOW, _DEFAULT_MAX_WINDOW_LAYERS = 4096, 28


def read_layers(fields: Fields, num_layers: int, rope: RopeConfig) -> tuple[LayerConfig, ...]:
    """Windows as Qwen 2 and 3 have them: `layer_types` where given, else layers from `max_window_layers` up; none at
    all unless `use_sliding_window`.
    """
    window = fields.optional_count("sliding_window", _DEFAULT_WINDOW)
    lowest = fields.count("max_window_layers", _DEFAULT_MAX_WINDOW_LAYERS, low=0)
    types = base.read_layer_types(fields, num_layers)
    if not fields.flag("use_sliding_window", False):
        window = None
    if types is None:
        types = tuple(base.SLIDING if window and i >= lowest else base.FULL for i in range(num_layers))
    if window is None and base.SLIDING in types:
        raise fields.wrong("layer_types", f"{base.FULL} throughout, because no sliding window is in use")
    return tuple(LayerConfig(window if kind == base.SLIDING else None, rope) for kind in types)


def _read_config(fields: Fields) -> ModelConfig:
    plain = base.read_plain("qwen2", fields, _DEFAULTS)
    num_layers = base.read_layer_count(fields, _DEFAULTS)
    config = replace(plain, layers=read_layers(fields, num_layers, flat_rope(fields, plain)), qkv_bias=True)
    base.finish(fields)
    return config


FAMILY = base.Family(_read_config)
