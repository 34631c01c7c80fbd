"""MistralForCausalLM: reads Mistral's `config.json` into a `ModelSpec`: as `llama`, with one sliding window for every
layer (absent = 4096, null = none).
"""

from tandem.architecture.families import base
from tandem.architecture.fields import Fields
from tandem.architecture.model import ModelSpec

_DEFAULTS = base.Defaults(max_positions=4096 * 32, kv_heads=8, eos_token_id=2, bos_token_id=1)
_DEFAULT_WINDOW = 4096


def _read_model(fields: Fields) -> ModelSpec:
    sizes = base.read_sizes(fields, _DEFAULTS)
    window, rope = fields.optional_count("sliding_window", _DEFAULT_WINDOW), sizes.rope(fields)
    layers = [
        base.pre_norm_layer(sizes, index, base.attention(sizes, index, rope, window=window))
        for index in range(sizes.num_layers)
    ]
    model = base.build_model("mistral", fields, sizes, layers)
    base.check_unread(fields)
    return model


FAMILY = base.Family(_read_model)  # found by `registry`
