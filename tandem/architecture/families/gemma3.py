"""Gemma 3 text: local and global layers with a rotary embedding each, unit-offset and sandwich norms.

`attn_logit_softcapping` is read and, as in transformers, has no effect in this family: its norms of q and k took its
place.
"""

from tandem.architecture.families import base
from tandem.architecture.families.windows import read_types, read_windows
from tandem.architecture.fields import Fields
from tandem.architecture.model import LayerSpec, ModelSpec
from tandem.architecture.rope import RopeSpec, read_rope

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
_HARMLESS = ("_sliding_window_pattern",)
_REFUSED = ("use_bidirectional_attention",)


def read_text_model(fields: Fields) -> ModelSpec:
    """Reads `config.json` of a text model, or `text_config` of a multimodal one."""
    sizes = base.read_sizes(fields, _DEFAULTS, unit_offset=True)
    fields.optional_number("attn_logit_softcapping")
    model = base.build_model(
        "gemma3",
        fields,
        sizes,
        _read_layers(fields, sizes),
        embedding_scale=sizes.hidden**0.5,
        logit_softcap=fields.optional_number("final_logit_softcapping") or 0.0,
    )
    base.check_unread(fields, _HARMLESS, _REFUSED)
    return model


def _read_layers(fields: Fields, sizes: base.Sizes) -> list[LayerSpec]:
    bias = fields.flag("attention_bias", False)
    scale = fields.number("query_pre_attn_scalar", 256.0) ** -0.5
    types = read_types(fields, sizes.num_layers, fields.count("sliding_window_pattern", _DEFAULT_PATTERN))
    windows = read_windows(fields, types, _DEFAULT_WINDOW)
    ropes = _read_ropes(fields, sizes)
    return [
        _layer(sizes, index, ropes[kind], window=window, scale=scale, bias=bias)
        for index, (kind, window) in enumerate(zip(types, windows, strict=True))
    ]


def _layer(sizes: base.Sizes, index: int, rope: RopeSpec, *, window: int | None, scale: float, bias: bool) -> LayerSpec:
    prefix = base.layer_prefix(index)
    return LayerSpec(
        mixer=base.attention(
            sizes, index, rope, window=window, scale=scale, qkv_bias=bias, output_bias=bias, head_norms=True
        ),
        feed_forward=base.gated(sizes, f"{prefix}.mlp"),
        before_mixer=sizes.norm(f"{prefix}.input_layernorm"),
        after_mixer=sizes.norm(f"{prefix}.post_attention_layernorm"),
        before_feed_forward=sizes.norm(f"{prefix}.pre_feedforward_layernorm"),
        after_feed_forward=sizes.norm(f"{prefix}.post_feedforward_layernorm"),
    )


def _read_ropes(fields: Fields, sizes: base.Sizes) -> dict[str, RopeSpec]:
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
        nested.refuse_unread()
    thetas = {
        base.FULL: fields.number("rope_theta", _GLOBAL_THETA),
        base.SLIDING: fields.number("rope_local_base_freq", _LOCAL_THETA),
    }
    return {
        kind: read_rope(
            fields,
            sections[kind],
            head_dim=sizes.head_dim,
            max_positions=sizes.max_positions,
            default_theta=thetas[kind],
        )
        for kind in sections
    }


FAMILY = base.Family(read_text_model)
