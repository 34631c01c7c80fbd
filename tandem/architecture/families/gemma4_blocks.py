"""Reads the feed-forward blocks of Gemma 4: a gated block, alone or summed with a mixture of experts."""

from collections.abc import Sequence

from tandem.architecture.families import base
from tandem.architecture.families.experts import stacked_experts
from tandem.architecture.feed_forward import (
    BranchSpec,
    FeedForwardSpec,
    GatedSpec,
    MixtureOfExpertsSpec,
    ParallelSpec,
    RouterSpec,
    Score,
)
from tandem.architecture.fields import Fields
from tandem.architecture.mixers import AttentionSpec
from tandem.architecture.tensors import LinearSpec, NormSpec, TensorSpec


def read_blocks(fields: Fields, sizes: base.Sizes, mixers: Sequence[AttentionSpec]) -> list[FeedForwardSpec]:
    """Reads the block of each layer. With `use_double_wide_mlp`, its intermediate size is doubled in layers that
    read another layer's K and V.
    """
    is_wide = fields.flag("use_double_wide_mlp", False)
    blocks = [
        base.gated(
            sizes,
            f"{base.layer_prefix(index)}.mlp",
            sizes.intermediate * (2 if is_wide and mixer.reads_state_of is not None else 1),
        )
        for index, mixer in enumerate(mixers)
    ]
    if not fields.flag("enable_moe_block", False):
        return list(blocks)
    num_experts = fields.count("num_experts", high=1 << 12)
    top_k = fields.count("top_k_experts", high=num_experts)
    width = fields.count("moe_intermediate_size", high=1 << 20)
    router = RouterSpec(
        linear=LinearSpec("router.proj", num_experts, sizes.hidden),
        norm=NormSpec("router", sizes.hidden, sizes.eps, weight="scale"),
        logit_scale=sizes.hidden**-0.5,
        top_k=top_k,
        score=Score.SOFTMAX,
        renormalise=True,
        expert_scales=TensorSpec("router.per_expert_scale", (num_experts,)),
    )
    return [
        _parallel_with_experts(sizes, base.layer_prefix(index), block, router, width)
        for index, block in enumerate(blocks)
    ]


def _parallel_with_experts(
    sizes: base.Sizes, prefix: str, block: GatedSpec, router: RouterSpec, width: int
) -> ParallelSpec:
    """Sum of `block` and experts, each between its own norms; the router has its own norm of the input."""
    experts = MixtureOfExpertsSpec(
        router=router.under(prefix),
        experts=stacked_experts(sizes, f"{prefix}.experts", router.num_experts, width),
        before_experts=sizes.norm(f"{prefix}.pre_feedforward_layernorm_2"),
    )
    gated = BranchSpec(
        block,
        before=sizes.norm(f"{prefix}.pre_feedforward_layernorm"),
        after=sizes.norm(f"{prefix}.post_feedforward_layernorm_1"),
    )
    return ParallelSpec((gated, BranchSpec(experts, None, sizes.norm(f"{prefix}.post_feedforward_layernorm_2"))))
