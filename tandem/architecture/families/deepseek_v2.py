"""DeepseekV2ForCausalLM: reads the `config.json` of DeepSeek-V2, V2-Lite and Coder-V2 into a `ModelSpec`: latent
attention (`latents`), and experts chosen by softmax (`grouped_experts`).
"""

from tandem.architecture.families import base
from tandem.architecture.families.grouped_experts import (
    UNUSED_KEYS,
    RoutingDefaults,
    read_blocks,
    read_groups,
    read_top_k,
)
from tandem.architecture.families.latents import LatentDefaults, read_latent_attention
from tandem.architecture.feed_forward import RouterSpec, Score
from tandem.architecture.fields import Fields
from tandem.architecture.model import ModelSpec
from tandem.architecture.tensors import LinearSpec

_DEFAULTS = base.Defaults(
    max_positions=2048,
    head_dim=64,
    eos_token_id=2,
    bos_token_id=1,
    hidden=4096,
    intermediate=11008,
    layers=32,
    heads=32,
    vocab=102_400,
)
_ROUTING = RoutingDefaults(num_experts=64, num_shared=2, width=1407, num_dense=0)
_GROUPED = "group_limited_greedy"


def _read_model(fields: Fields) -> ModelSpec:
    sizes = base.read_sizes(fields, _DEFAULTS)
    attention = read_latent_attention(fields, sizes, LatentDefaults(), is_interleaved=True)
    blocks = read_blocks(fields, sizes, _read_router(fields, sizes), _ROUTING)
    layers = [base.pre_norm_layer(sizes, index, attention(index), block) for index, block in enumerate(blocks)]
    model = base.build_model("deepseek_v2", fields, sizes, layers)
    base.check_unread(fields, UNUSED_KEYS)
    return model


def _read_router(fields: Fields, sizes: base.Sizes) -> RouterSpec:
    """Reads the router, in which a group's score is its best expert's. NOTE: weights are not divided by their sum,
    which `transformers` never does and DeepSeek's files never ask for.
    """
    fields.only("scoring_func", ("softmax",), "softmax")
    fields.only("norm_topk_prob", (False,), "false")
    fields.only("topk_method", ("greedy", _GROUPED), f"greedy, {_GROUPED}")
    num_experts, num_groups, top_groups = read_groups(fields, _ROUTING, least=1)
    if fields.text("topk_method", "greedy") != _GROUPED:
        num_groups = top_groups = 1
    return RouterSpec(
        linear=LinearSpec("gate", num_experts, sizes.hidden, is_float32=True),
        top_k=read_top_k(fields, _ROUTING, top_groups * num_experts // num_groups),
        score=Score.SOFTMAX,
        scale=fields.number("routed_scaling_factor", _ROUTING.scale),
        num_groups=num_groups,
        top_groups=top_groups,
        best_of_group=1,
    )


FAMILY = base.Family(_read_model)  # found by `registry`
