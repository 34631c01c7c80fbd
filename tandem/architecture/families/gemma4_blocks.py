"""Feed-forward block and per-layer embedding of a layer of Gemma 4, computed of each token by itself."""

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
from tandem.architecture.per_layer_embedding import PerLayerEmbeddingSpec
from tandem.architecture.tensors import LinearSpec, NormSpec, ShardAxis, Source, TensorSpec

_MODEL_PROJECTION = "model.per_layer_model_projection"


def read_blocks(fields: Fields, sizes: base.Sizes, mixers: Sequence[AttentionSpec]) -> list[FeedForwardSpec]:
    """Of each layer; twice as wide, if `use_double_wide_mlp`, in those that read another's K and V."""
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
    return [_beside(sizes, base.layer_prefix(index), block, router, width) for index, block in enumerate(blocks)]


def _beside(sizes: base.Sizes, prefix: str, block: GatedSpec, router: RouterSpec, width: int) -> ParallelSpec:
    """`block` and experts, each between norms of its own; the router sees what neither has normed."""
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


def read_embeddings(fields: Fields, sizes: base.Sizes) -> list[PerLayerEmbeddingSpec | None]:
    """Of each layer; all share one table and one norm.

    NOTE: the model projection is divided by the root of its inputs before it is normed. That changes only what the
    norm's epsilon means.
    """
    size = fields.optional_count("hidden_size_per_layer_input", 256, low=0, high=1 << 14) or 0
    vocab = fields.count("vocab_size_per_layer_input", 262_144)
    if not size:
        return [None] * sizes.num_layers
    if vocab < sizes.vocab:
        raise fields.wrong("vocab_size_per_layer_input", f"at least vocab_size={sizes.vocab}")
    table = TensorSpec("model.embed_tokens_per_layer.weight", (vocab, sizes.num_layers * size), is_lookup=True)
    norm = NormSpec("model.per_layer_projection_norm", size, sizes.eps * sizes.hidden)

    def embedding(index: int) -> PerLayerEmbeddingSpec:
        prefix, start = base.layer_prefix(index), index * size
        rows = Source(f"{_MODEL_PROJECTION}.weight", start=start, stop=start + size)
        return PerLayerEmbeddingSpec(
            table=table,
            start=start,
            table_scale=size**0.5,
            context=LinearSpec(f"{_MODEL_PROJECTION}.{index}", size, sizes.hidden, weight_source=rows),
            context_norm=norm,
            scale=2**-0.5,
            gate=LinearSpec(f"{prefix}.per_layer_input_gate", size, sizes.hidden),
            project=LinearSpec(f"{prefix}.per_layer_projection", sizes.hidden, size, axis=ShardAxis.ROW),
            after=sizes.norm(f"{prefix}.post_per_layer_input_norm"),
            activation=sizes.activation,
        )

    return [embedding(index) for index in range(sizes.num_layers)]
