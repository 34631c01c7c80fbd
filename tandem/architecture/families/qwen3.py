"""Qwen3ForCausalLM: reads Qwen 3's `config.json` into a `ModelSpec`: as `llama`, with a norm on every head of q and k,
a head size of its own, and the windows of `qwen2`.
"""

from tandem.architecture.families import base
from tandem.architecture.families.qwen2 import read_windows
from tandem.architecture.fields import Fields
from tandem.architecture.mixers import AttentionSpec
from tandem.architecture.model import ModelSpec

_DEFAULTS = base.Defaults(max_positions=32768, kv_heads=32, head_dim=128)


def read_attention(fields: Fields, sizes: base.Sizes, windows: tuple[int | None, ...]) -> list[AttentionSpec]:
    """Reads the attention of every layer of Qwen 3, with or without experts."""
    bias, rope = fields.flag("attention_bias", False), sizes.rope(fields)
    fields.only("use_qk_norm", (True,), "true")
    return [
        base.attention(sizes, index, rope, window=window, qkv_bias=bias, output_bias=bias, head_norms=True)
        for index, window in enumerate(windows)
    ]


def _read_model(fields: Fields) -> ModelSpec:
    sizes = base.read_sizes(fields, _DEFAULTS)
    mixers = read_attention(fields, sizes, read_windows(fields, sizes.num_layers))
    layers = [base.pre_norm_layer(sizes, index, mixer) for index, mixer in enumerate(mixers)]
    model = base.build_model("qwen3", fields, sizes, layers)
    base.check_unread(fields)
    return model


FAMILY = base.Family(_read_model)  # found by `registry`
