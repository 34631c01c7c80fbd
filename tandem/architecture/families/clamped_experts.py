"""Reads the feed-forward blocks of MiniMax-M3: gated ones with clamped activations, and mixtures of such experts."""

from collections.abc import Sequence
from dataclasses import replace

from tandem.architecture.families import base
from tandem.architecture.families.experts import mixture_of_experts, read_num_experts
from tandem.architecture.families.phi3 import fused
from tandem.architecture.feed_forward import Clamp, FeedForwardSpec, GatedSpec, RouterSpec, Score
from tandem.architecture.fields import Fields
from tandem.architecture.tensors import LinearSpec, TensorSpec

_DENSE_BLOCK, _SPARSE_BLOCK = "dense", "sparse"


def read_blocks(fields: Fields, sizes: base.Sizes, is_fused: bool) -> list[FeedForwardSpec]:
    """Reads the block of each layer. `is_fused`: gate and up of blocks without experts are rows of one tensor."""
    clamp = Clamp(alpha=fields.number("swiglu_alpha", 1.702), limit=fields.number("swiglu_limit", 7.0))
    dense_width = fields.count("dense_intermediate_size", 12_288, high=1 << 20)
    shared_width = fields.count("shared_intermediate_size", 3072, high=1 << 20)
    num_experts = read_num_experts(fields, 128)
    router = RouterSpec(
        linear=LinearSpec("gate", num_experts, sizes.hidden),
        top_k=fields.count("num_experts_per_tok", 4, high=num_experts),
        score=Score.SIGMOID,
        correction=TensorSpec("gate.e_score_correction_bias", (num_experts,), is_float32=True),
        renormalise=True,
        scale=fields.number("routed_scaling_factor", 2.0),
    )

    def gated(prefix: str, width: int) -> GatedSpec:
        block = replace(base.gated(sizes, prefix, width), clamp=clamp)
        if not is_fused:
            return block
        gate, up = fused((block.gate, block.up), f"{prefix}.gate_up_proj.weight")
        return replace(block, gate=gate, up=up)

    def block(index: int, has_experts: bool) -> FeedForwardSpec:
        prefix = f"{base.layer_prefix(index)}.mlp"
        if not has_experts:
            return gated(prefix, dense_width)
        shared = gated(f"{prefix}.shared_experts", shared_width)
        mixture = mixture_of_experts(sizes, prefix, router, sizes.intermediate, shared)
        experts = tuple(replace(expert, clamp=clamp) for expert in mixture.experts if isinstance(expert, GatedSpec))
        return replace(mixture, experts=experts)

    return [block(index, has_experts) for index, has_experts in enumerate(_read_mixtures(fields, sizes.num_layers))]


def _read_mixtures(fields: Fields, num_layers: int) -> Sequence[bool]:
    """For each layer, whether it has experts."""
    listed, types = fields.indices("moe_layer_freq", 2), fields.texts("mlp_layer_types")
    if types is None:
        types = tuple(_SPARSE_BLOCK if each else _DENSE_BLOCK for each in listed) or (_SPARSE_BLOCK,) * num_layers
    if len(types) != num_layers or not {*types} <= {_DENSE_BLOCK, _SPARSE_BLOCK}:
        raise fields.wrong(
            "mlp_layer_types" if fields.has("mlp_layer_types") else "moe_layer_freq",
            f"a list of num_hidden_layers={num_layers} entries, {_DENSE_BLOCK} or {_SPARSE_BLOCK}, or 0 or 1",
        )
    return [each == _SPARSE_BLOCK for each in types]
