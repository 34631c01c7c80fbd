"""Glm4MoeForCausalLM: reads the `config.json` of GLM 4.5 to 4.7 into a `ModelSpec`: attention in which half of each
head is rotated, and experts as in `deepseek_v3` (`grouped_experts`).

An additional layer after the last one predicts further tokens (multi-token prediction).
"""

from functools import partial

from tandem.architecture.families import base
from tandem.architecture.families.experts import TRAINING_KEYS
from tandem.architecture.families.grouped_experts import RoutingDefaults, build_model
from tandem.architecture.fields import Fields
from tandem.architecture.model import ModelSpec

_DEFAULTS = base.Defaults(
    max_positions=131_072,
    kv_heads=8,
    eps=1e-5,
    rotary_share=0.5,
    hidden=4096,
    intermediate=10944,
    layers=46,
    heads=96,
    vocab=151_552,
)
_ROUTING = RoutingDefaults(num_experts=128, top_k=8, width=1408, num_dense=1)


def _read_model(fields: Fields) -> ModelSpec:
    sizes = base.read_sizes(fields, _DEFAULTS)
    rope, bias, norms = sizes.rope(fields), fields.flag("attention_bias", False), fields.flag("use_qk_norm", False)
    attention = partial(base.attention, sizes, rope=rope, qkv_bias=bias, head_norms=norms)
    model = build_model("glm4_moe", fields, sizes, attention, _ROUTING)
    base.check_unread(fields, TRAINING_KEYS)
    return model


FAMILY = base.Family(_read_model)  # found by `registry`
