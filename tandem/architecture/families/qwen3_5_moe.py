"""Qwen3_5MoeForCausalLM: reads the `config.json` of the text model of Qwen3.5 and 3.6 with experts into a `ModelSpec`.

Mixers and tensor names are those of `qwen3_5`; every layer has experts as in `qwen3_moe`, and a shared block with its
own gate as in `qwen2_moe`.
"""

from tandem.architecture.families import base
from tandem.architecture.families.experts import TRAINING_KEYS
from tandem.architecture.families.qwen2_moe import with_shared
from tandem.architecture.families.qwen3_5 import build_text_model, parameter_name, read_text_mixers
from tandem.architecture.families.qwen3_moe import read_blocks
from tandem.architecture.fields import Fields
from tandem.architecture.model import ModelSpec

_DEFAULTS = base.Defaults(
    max_positions=32768,
    kv_heads=2,
    head_dim=256,
    rotary_share=0.25,
    hidden=2048,
    intermediate=512,  # NOTE: no layer has it
    layers=40,
    heads=16,
    vocab=248_320,
)


def _read_model(fields: Fields) -> ModelSpec:
    sizes = base.read_sizes(fields, _DEFAULTS, unit_offset=True)
    for name, value in (("norm_topk_prob", True), ("decoder_sparse_step", 1), ("mlp_only_layers", [])):
        fields.only(name, (value,), str(value).lower())
    width = fields.count("shared_expert_intermediate_size", 512, high=1 << 20)
    blocks = read_blocks(fields, sizes, num_experts=256, top_k=8, width=512, renormalise=True)
    shared = [with_shared(sizes, index, block, width) for index, block in enumerate(blocks)]
    model = build_text_model("qwen3_5_moe", fields, sizes, read_text_mixers(fields, sizes), shared)
    base.check_unread(fields, TRAINING_KEYS)
    return model


FAMILY = base.Family(_read_model, parameter_name)  # found by `registry`
