"""Gemma2ForCausalLM: reads Gemma 2's `config.json` into a `ModelSpec`: windows on every other layer, norms with a
factor of 1 + weight before and after each block (`sandwich_layer`), softcaps on scores and logits.
"""

from dataclasses import replace

from tandem.architecture.families import base
from tandem.architecture.families.windows import read_types, read_windows
from tandem.architecture.fields import Fields
from tandem.architecture.mixers import AttentionSpec
from tandem.architecture.model import LayerSpec, ModelSpec

_DEFAULTS = base.Defaults(
    max_positions=8192,
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
    vocab=256_000,
)
_DEFAULT_WINDOW, _PATTERN = 4096, 2
_DEFAULT_SCORE_BOUND, _DEFAULT_LOGIT_BOUND = 50.0, 30.0
_HARMLESS = ("hidden_act", "cache_implementation")
_REFUSED = ("use_bidirectional_attention",)


def _read_model(fields: Fields) -> ModelSpec:
    sizes = base.read_sizes(fields, _DEFAULTS, unit_offset=True)
    model = base.build_model(
        "gemma2",
        fields,
        sizes,
        _read_layers(fields, sizes),
        embedding_scale=sizes.hidden**0.5,
        logit_softcap=_read_bound(fields, "final_logit_softcapping", _DEFAULT_LOGIT_BOUND),
    )
    base.check_unread(fields, _HARMLESS, _REFUSED)
    return model


def _read_layers(fields: Fields, sizes: base.Sizes) -> list[LayerSpec]:
    bias, rope = fields.flag("attention_bias", False), sizes.rope(fields)
    scale = fields.number("query_pre_attn_scalar", 256.0) ** -0.5
    bound = _read_bound(fields, "attn_logit_softcapping", _DEFAULT_SCORE_BOUND)
    windows = read_windows(fields, read_types(fields, sizes.num_layers, _PATTERN), _DEFAULT_WINDOW)

    def attention(index: int) -> AttentionSpec:
        found = base.attention(sizes, index, rope, window=windows[index], scale=scale, qkv_bias=bias, output_bias=bias)
        return replace(found, softcap=bound)

    return [base.sandwich_layer(sizes, index, attention(index)) for index in range(sizes.num_layers)]


def _read_bound(fields: Fields, name: str, default: float) -> float:
    """Softcap under the key `name`; 0 = none, which a file states by null."""
    return (fields.optional_number(name) or 0.0) if fields.has(name) else default


FAMILY = base.Family(_read_model)  # found by `registry`
