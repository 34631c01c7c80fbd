"""Qwen2ForCausalLM: reads the `config.json` of Qwen 2 and 2.5 into a `ModelSpec`: as `llama`, with biases on q, k and
v, and an optional window on the upper layers.
"""

from tandem.architecture.families import base
from tandem.architecture.families.windows import read_optional_windows
from tandem.architecture.fields import Fields
from tandem.architecture.model import ModelSpec

_DEFAULTS = base.Defaults(max_positions=32768, kv_heads=32)
_DEFAULT_WINDOW, _DEFAULT_MAX_WINDOW_LAYERS = 4096, 28


def read_windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    """Reads the window of each layer in Qwen 2 and 3: from `layer_types` if given, else of layers from
    `max_window_layers` on. There is none without `use_sliding_window`.
    """
    window = fields.optional_count("sliding_window", _DEFAULT_WINDOW)
    lowest = fields.count("max_window_layers", _DEFAULT_MAX_WINDOW_LAYERS, low=0)
    return read_optional_windows(fields, num_layers, window, lambda index: index >= lowest)


def _read_model(fields: Fields) -> ModelSpec:
    sizes = base.read_sizes(fields, _DEFAULTS)
    windows, rope = read_windows(fields, sizes.num_layers), sizes.rope(fields)
    layers = [
        base.pre_norm_layer(sizes, index, base.attention(sizes, index, rope, window=window, qkv_bias=True))
        for index, window in enumerate(windows)
    ]
    model = base.build_model("qwen2", fields, sizes, layers)
    base.check_unread(fields)
    return model


FAMILY = base.Family(_read_model)  # found by `registry`
