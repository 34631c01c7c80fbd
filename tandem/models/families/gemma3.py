"""Gemma 3 text: local and global layers with a rotary embedding each, unit-offset and sandwich norms.

`attn_logit_softcapping` is read and, as in transformers, has no effect in this family: its norms of q and k took its
place.
"""

from dataclasses import replace

from tandem.models.config import LayerConfig, ModelConfig, RopeConfig
from tandem.models.families import base
from tandem.models.fields import Fields
from tandem.models.rope import read_rope

_DEFAULTS = base.Defaults(
    max_positions=131_072,
    kv_heads=4,
    head_dim=256,
    eos_token_id=1,
    bos_token_id=2,
    tied=True,
    activation_key="hidden_activation",
    activation="gelu_pytorch_tanh",
    hidden=2304,
    intermediate=9216,
    layers=26,
    heads=8,
    vocab=262_208,
)
_GLOBAL_THETA, _LOCAL_THETA = 1_000_000.0, 10_000.0
_DEFAULT_WINDOW, _DEFAULT_PATTERN = 4096, 6
_HARMLESS = frozenset({"_sliding_window_pattern"})


def read_text_config(fields: Fields) -> ModelConfig:
    """From `config.json` of a text model, or from `text_config` of a multimodal one."""
    plain = base.read_plain("gemma3", fields, _DEFAULTS)
    attention_bias = fields.flag("attention_bias", False)
    fields.optional_number("attn_logit_softcapping")
    config = replace(
        plain,
        layers=_read_layers(fields, plain),
        attention_scale=fields.number("query_pre_attn_scalar", 256.0) ** -0.5,
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        qk_norm=True,
        unit_offset_norm=True,
        sandwich_norm=True,
        embedding_scale=plain.hidden_size**0.5,
        logit_softcap=fields.optional_number("final_logit_softcapping") or 0.0,
    )
    base.finish(fields, _HARMLESS)
    return config


def _read_layers(fields: Fields, plain: ModelConfig) -> tuple[LayerConfig, ...]:
    """`layer_types` where given; else every `sliding_window_pattern`-th layer is global (older files)."""
    num_layers = base.read_layer_count(fields, _DEFAULTS)
    window = fields.optional_count("sliding_window", _DEFAULT_WINDOW)
    pattern = fields.count("sliding_window_pattern", _DEFAULT_PATTERN)
    types = base.read_layer_types(fields, num_layers)
    if types is None:
        types = tuple(base.SLIDING if (i + 1) % pattern else base.FULL for i in range(num_layers))
    if window is None and base.SLIDING in types:
        raise fields.wrong("sliding_window", "a positive integer where layers are sliding")
    ropes = _read_ropes(fields, plain)
    return tuple(LayerConfig(window if kind == base.SLIDING else None, ropes[kind]) for kind in types)


def _read_ropes(fields: Fields, plain: ModelConfig) -> dict[str, RopeConfig]:
    """Newer files nest `rope_parameters` by layer type; older ones have `rope_theta` and `rope_scaling` for the global
    layers and `rope_local_base_freq` for the local ones.
    """
    nested, scaling = fields.section("rope_parameters"), fields.section("rope_scaling")
    if nested is not None and scaling is not None:
        raise fields.unsupported("rope_scaling", "either rope_parameters or rope_scaling")
    sections = {
        base.FULL: nested.section(base.FULL) if nested else scaling,
        base.SLIDING: nested.section(base.SLIDING) if nested else None,
    }
    for section in filter(None, sections.values()):
        section.only("truncate", (True,), "true (transformers does not read it for this family)")
    if nested is not None:
        nested.finish()
    thetas = {
        base.FULL: fields.number("rope_theta", _GLOBAL_THETA),
        base.SLIDING: fields.number("rope_local_base_freq", _LOCAL_THETA),
    }
    return {kind: read_rope(fields, sections[kind], plain, thetas[kind]) for kind in sections}


FAMILY = base.Family(read_text_config)
