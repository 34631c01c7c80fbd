"""MistralForCausalLM: reads Mistral's `config.json` into a `ModelSpec`: as `llama`, with a sliding window (absent =
4096, null = none) in the layers that `layer_types` names, or in every layer if there is no such list.
"""

from tandem.architecture.families import base
from tandem.architecture.families.windows import read_windows
from tandem.architecture.fields import Fields
from tandem.architecture.model import ModelSpec

_DEFAULTS = base.Defaults(max_positions=4096 * 32, kv_heads=8, eos_token_id=2, bos_token_id=1)
_DEFAULT_WINDOW = 4096


def _read_model(fields: Fields) -> ModelSpec:
    sizes = base.read_sizes(fields, _DEFAULTS)
    types, rope = _read_types(fields, sizes.num_layers), sizes.rope(fields)
    layers = [
        base.pre_norm_layer(sizes, index, base.attention(sizes, index, rope, window=window))
        for index, window in enumerate(read_windows(fields, types, _DEFAULT_WINDOW))
    ]
    model = base.build_model("mistral", fields, sizes, layers)
    base.check_unread(fields)
    return model


def _read_types(fields: Fields, num_layers: int) -> tuple[str, ...]:
    """Kind of each layer. NOTE: transformers reads a file with `layer_types` as one of its family `ministral`."""
    types = base.read_layer_types(fields, num_layers)
    if types is not None:
        return types
    is_sliding = fields.optional_count("sliding_window", _DEFAULT_WINDOW) is not None
    return (base.SLIDING if is_sliding else base.FULL,) * num_layers


FAMILY = base.Family(_read_model)  # found by `registry`
