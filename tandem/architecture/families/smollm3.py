"""SmolLM3ForCausalLM: reads SmolLM3's `config.json` into a `ModelSpec`: as `llama`, but without position encoding in
every fourth layer.
"""

from tandem.architecture.families import base
from tandem.architecture.families.windows import read_optional_windows
from tandem.architecture.fields import Fields
from tandem.architecture.model import ModelSpec

_DEFAULTS = base.Defaults(
    max_positions=32768,
    kv_heads=4,
    eos_token_id=128_001,
    bos_token_id=128_000,
    tied=True,
    theta=2e6,
    hidden=2048,
    intermediate=11008,
    layers=36,
    heads=16,
    vocab=128_256,
)
_DEFAULT_INTERVAL = 4


def _read_model(fields: Fields) -> ModelSpec:
    sizes = base.read_sizes(fields, _DEFAULTS)
    rope, have_rope = sizes.rope(fields), _read_rope_layers(fields, sizes.num_layers)
    window = fields.optional_count("sliding_window")
    windows = read_optional_windows(fields, sizes.num_layers, window, lambda index: not have_rope[index])
    bias, mlp_bias = fields.flag("attention_bias", False), fields.flag("mlp_bias", False)
    layers = [
        base.pre_norm_layer(
            sizes,
            index,
            base.attention(sizes, index, rope if has_rope else None, window=window, qkv_bias=bias, output_bias=bias),
            base.gated(sizes, f"{base.layer_prefix(index)}.mlp", bias=mlp_bias),
        )
        for index, (has_rope, window) in enumerate(zip(have_rope, windows, strict=True))
    ]
    model = base.build_model("smollm3", fields, sizes, layers)
    base.check_unread(fields)
    return model


def _read_rope_layers(fields: Fields, num_layers: int) -> tuple[bool, ...]:
    """Whether each layer rotates: `no_rope_layers` has a 1 (sic) for layers that do; else all but every nth."""
    interval = fields.count("no_rope_layer_interval", _DEFAULT_INTERVAL)
    if fields.get("no_rope_layers") is None:
        return tuple((index + 1) % interval != 0 for index in range(num_layers))
    return tuple(bool(value) for value in fields.indices("no_rope_layers", 2))


FAMILY = base.Family(_read_model)  # found by `registry`
