"""Reads the feed-forward blocks of Granite's mixtures of experts (3 and 4), with or without a shared block."""

from dataclasses import replace

from tandem.architecture.expert_stacks import from_stack
from tandem.architecture.families import base
from tandem.architecture.feed_forward import FeedForwardSpec, GatedSpec, MixtureOfExpertsSpec, RouterSpec, Score
from tandem.architecture.fields import MAX_COUNT, Fields
from tandem.architecture.tensors import LinearSpec


def read_blocks(fields: Fields, sizes: base.Sizes, width: int | None = None) -> list[FeedForwardSpec]:
    """Experts for each layer, if there are any, and a shared gated block of inner size `width`; None = no shared block.

    Raises:
        CorruptCheckpointError: there are neither experts nor a shared block.
    """
    num_experts = fields.count("num_local_experts", 8, low=0 if width else 1, high=1 << 12)
    top_k = fields.count("num_experts_per_tok", 2, low=min(1, num_experts), high=num_experts or MAX_COUNT)
    router = RouterSpec(
        linear=LinearSpec("router.layer", num_experts, sizes.hidden),
        top_k=top_k,
        score=Score.SOFTMAX_OF_CHOSEN,
        rounded=True,
    )

    def block(index: int) -> FeedForwardSpec:
        prefix = base.layer_prefix(index)
        shared = _gated(sizes, f"{prefix}.shared_mlp", width, None) if width else None
        if shared is not None and not num_experts:
            return shared
        name = f"{prefix}.block_sparse_moe"
        experts = [_gated(sizes, name, sizes.intermediate, expert) for expert in range(num_experts)]
        return MixtureOfExpertsSpec(router=router.under(name), experts=tuple(experts), shared=shared)

    return [block(index) for index in range(sizes.num_layers)]


def _gated(sizes: base.Sizes, prefix: str, width: int, expert: int | None) -> GatedSpec:
    """A gated block whose gate and up are one tensor, gate first. `expert`: its index in a stack of such blocks."""
    name = prefix if expert is None else f"{prefix}.{expert}"
    plain = base.gated(sizes, name, width)
    named = replace(plain, down=replace(plain.down, name=f"{name}.output_linear"))
    return from_stack(named, prefix, expert, "input_linear.weight", "output_linear.weight")
