"""Gemma3ForCausalLM: reads the `config.json` of Gemma 3's text model into a `ModelSpec`: local and global layers, each
kind with its own rotary embedding; norms with a factor of 1 + weight before and after each block.

`attn_logit_softcapping` is read and, as in transformers, has no effect in this family, which has norms of q and k
instead.
"""

from tandem.architecture.families import base
from tandem.architecture.families.gemma3_ropes import read_ropes
from tandem.architecture.families.windows import read_types, read_windows
from tandem.architecture.fields import Fields
from tandem.architecture.mixers import AttentionSpec
from tandem.architecture.model import LayerSpec, ModelSpec

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
    ropes = read_ropes(fields, sizes)

    def attention(index: int, kind: str) -> AttentionSpec:
        return base.attention(
            sizes,
            index,
            ropes[kind],
            window=windows[index],
            scale=scale,
            qkv_bias=bias,
            output_bias=bias,
            head_norms=True,
        )

    return [base.sandwich_layer(sizes, index, attention(index, kind)) for index, kind in enumerate(types)]


FAMILY = base.Family(read_text_model)  # found by `registry`
