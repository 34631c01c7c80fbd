"""Mistral4ForCausalLM: reads the `config.json` of Mistral Small 4 into a `ModelSpec`: latent attention (`latents`),
queries that grow slowly with their position (`ministral3`), and stacked experts chosen by softmax (`grouped_experts`).
"""

from dataclasses import replace

from tandem.architecture.families import base
from tandem.architecture.families.grouped_experts import (
    UNUSED_KEYS,
    RoutingDefaults,
    read_blocks,
    read_groups,
    read_top_k,
)
from tandem.architecture.families.latents import LatentDefaults, read_head_dims, read_latent_attention
from tandem.architecture.families.ministral3 import read_positions
from tandem.architecture.feed_forward import RouterSpec, Score
from tandem.architecture.fields import Fields
from tandem.architecture.model import ModelSpec
from tandem.architecture.tensors import LinearSpec

_DEFAULTS = base.Defaults(
    max_positions=1_048_576,
    head_dim=128,
    eos_token_id=2,
    bos_token_id=1,
    hidden=4096,
    intermediate=12288,
    layers=36,
    heads=32,
    vocab=131_072,
)
_ROUTING = RoutingDefaults(num_experts=128, top_k=4, width=2048, num_dense=0)
_LATENTS = LatentDefaults(rank=256, query_rank=1024, plain_dim=64)
_EPSILON = 1e-20


def _read_model(fields: Fields) -> ModelSpec:
    sizes = base.read_sizes(fields, _DEFAULTS)
    plain_dim, rotary_dim = read_head_dims(fields, _LATENTS)
    head_dim = plain_dim + rotary_dim
    rope, scaling = read_positions(fields, sizes, head_dim, rotary_dim / head_dim)
    attention = read_latent_attention(
        fields, sizes, _LATENTS, is_interleaved=fields.flag("rope_interleave", True), rope=rope
    )
    blocks = read_blocks(fields, sizes, _read_router(fields, sizes), _ROUTING, are_stacked=True)
    layers = [
        base.pre_norm_layer(sizes, index, replace(attention(index), query_scaling=scaling), block)
        for index, block in enumerate(blocks)
    ]
    model = base.build_model("mistral4", fields, sizes, layers)
    base.check_unread(fields, UNUSED_KEYS, refused=("rope_scaling",))
    return model


def _read_router(fields: Fields, sizes: base.Sizes) -> RouterSpec:
    num_experts, num_groups, top_groups = read_groups(fields, _ROUTING)
    return RouterSpec(
        linear=LinearSpec("gate", num_experts, sizes.hidden),
        top_k=read_top_k(fields, _ROUTING, top_groups * num_experts // num_groups),
        score=Score.SOFTMAX,
        renormalise=fields.flag("norm_topk_prob", True),
        epsilon=_EPSILON,
        scale=fields.number("routed_scaling_factor", _ROUTING.scale),
        rounded=True,
        num_groups=num_groups,
        top_groups=top_groups,
    )


FAMILY = base.Family(_read_model)  # found by `registry`
