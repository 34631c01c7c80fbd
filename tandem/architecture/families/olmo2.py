"""Olmo2ForCausalLM: reads Olmo 2's `config.json` into a `ModelSpec`: as `llama`, but with norms after each block
instead of before it, and a norm over all heads of q and of k.
"""

from tandem.architecture.families import base
from tandem.architecture.fields import Fields
from tandem.architecture.model import LayerSpec, ModelSpec
from tandem.architecture.rope import RopeSpec

DEFAULTS = base.Defaults(
    max_positions=2048,
    eos_token_id=50279,
    eps=1e-5,
    hidden=4096,
    intermediate=11008,
    layers=32,
    heads=32,
    vocab=50304,
)


def layer(sizes: base.Sizes, index: int, rope: RopeSpec, *, bias: bool, window: int | None = None) -> LayerSpec:
    """A layer of Olmo 2 and 3."""
    prefix = base.layer_prefix(index)
    return LayerSpec(
        mixer=base.attention(sizes, index, rope, window=window, qkv_bias=bias, output_bias=bias, whole_norms=True),
        feed_forward=base.gated(sizes, f"{prefix}.mlp"),
        before_mixer=None,
        after_mixer=sizes.norm(f"{prefix}.post_attention_layernorm"),
        before_feed_forward=None,
        after_feed_forward=sizes.norm(f"{prefix}.post_feedforward_layernorm"),
    )


def _read_model(fields: Fields) -> ModelSpec:
    sizes = base.read_sizes(fields, DEFAULTS)
    rope, bias = sizes.rope(fields), fields.flag("attention_bias", False)
    layers = [layer(sizes, index, rope, bias=bias) for index in range(sizes.num_layers)]
    model = base.build_model("olmo2", fields, sizes, layers)
    base.check_unread(fields)
    return model


FAMILY = base.Family(_read_model)  # found by `registry`
