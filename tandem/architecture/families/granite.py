"""GraniteForCausalLM: reads Granite 3's `config.json` into a `ModelSpec`: as `llama`, with constant factors on
embeddings, scores, block outputs and logits. Other modules of Granite build on its functions.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final

from tandem.architecture.families import base
from tandem.architecture.fields import Fields
from tandem.architecture.mixers import AttentionSpec
from tandem.architecture.model import LayerSpec, ModelSpec
from tandem.architecture.rope import RopeSpec

DEFAULTS: Final = base.Defaults(
    max_positions=2048,
    eos_token_id=2,
    bos_token_id=1,
    hidden=4096,
    intermediate=11008,
    layers=32,
    heads=32,
    vocab=32000,
)


def _read_model(fields: Fields) -> ModelSpec:
    sizes = base.read_sizes(fields, DEFAULTS)
    attention, mlp_bias = read_attention(fields, sizes, sizes.rope(fields)), fields.flag("mlp_bias", False)
    layers = [
        base.pre_norm_layer(
            sizes,
            index,
            attention(index),
            base.gated(sizes, f"{base.layer_prefix(index)}.mlp", bias=mlp_bias),
        )
        for index in range(sizes.num_layers)
    ]
    model = build_model("granite", fields, sizes, layers)
    base.check_unread(fields)
    return model


def read_attention(fields: Fields, sizes: base.Sizes, rope: RopeSpec | None) -> Callable[[int], AttentionSpec]:
    """Returns a function from a layer's index to its attention."""
    scale, bias = fields.number("attention_multiplier", 1.0), fields.flag("attention_bias", False)
    return lambda index: base.attention(sizes, index, rope, scale=scale, qkv_bias=bias, output_bias=bias)


def build_model(family: str, fields: Fields, sizes: base.Sizes, layers: Iterable[LayerSpec]) -> ModelSpec:
    """The model with these layers, and the factors of residual branches, embeddings and logits."""
    residual_scale = fields.number("residual_multiplier", 1.0)
    model = base.build_model(
        family,
        fields,
        sizes,
        [replace(layer, residual_scale=residual_scale) for layer in layers],
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        logit_scale=1.0 / fields.number("logits_scaling", 1.0),
    )
    return replace(model, rounds_embedding_scale=False)


FAMILY = base.Family(_read_model)  # found by `registry`
