"""Lfm2MoeForCausalLM: reads the `config.json` of LFM2-8B-A1B into a `ModelSpec`: as `lfm2`, with experts in all layers
but the first ones.
"""

from dataclasses import replace

from tandem.architecture.families import base, lfm2
from tandem.architecture.families.experts import TRAINING_KEYS, mixtral_experts, mixtral_gated, read_num_experts
from tandem.architecture.families.lfm2_mixers import read_mixers
from tandem.architecture.feed_forward import FeedForwardSpec, RouterSpec, Score
from tandem.architecture.fields import Fields
from tandem.architecture.model import ModelSpec
from tandem.architecture.tensors import LinearSpec, TensorSpec

_DEFAULTS = replace(lfm2.DEFAULTS, hidden=2048, intermediate=7168)
_EPSILON = 1e-6


def _read_model(fields: Fields) -> ModelSpec:
    sizes = lfm2.read_sizes(fields, _DEFAULTS)
    router, num_dense = _read_router(fields, sizes), fields.count("num_dense_layers", 2, low=0)
    width = fields.count("moe_intermediate_size", 1792, high=1 << 20)

    def block(index: int) -> FeedForwardSpec:
        prefix = f"{base.layer_prefix(index)}.feed_forward"
        if index < num_dense:
            return mixtral_gated(sizes, prefix)
        return mixtral_experts(sizes, prefix, router, width)

    layers = [lfm2.layer(sizes, index, mixer, block(index)) for index, mixer in enumerate(read_mixers(fields, sizes))]
    model = lfm2.finish(fields, sizes, base.build_model("lfm2_moe", fields, sizes, layers))
    base.check_unread(fields, (*lfm2.UNUSED_KEYS, *TRAINING_KEYS))
    return model


def _read_router(fields: Fields, sizes: base.Sizes) -> RouterSpec:
    num_experts = read_num_experts(fields, 32)
    correction = TensorSpec("expert_bias", (num_experts,), is_float32=True)
    return RouterSpec(
        linear=LinearSpec("gate", num_experts, sizes.hidden),
        top_k=fields.count("num_experts_per_tok", 4, high=num_experts),
        score=Score.SIGMOID,
        correction=correction if fields.flag("use_expert_bias", True) else None,
        renormalise=fields.flag("norm_topk_prob", True),
        epsilon=_EPSILON,
        scale=fields.number("routed_scaling_factor", 1.0),
    )


FAMILY = base.Family(_read_model)  # found by `registry`
