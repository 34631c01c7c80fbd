"""GraniteMoeHybridForCausalLM: Granite 4. Mamba-2 layers, and attention in a few; the multipliers of Granite 3."""

from dataclasses import replace

from tandem.architecture.expert_stacks import from_stack
from tandem.architecture.families import base, granite
from tandem.architecture.families.experts import TRAINING_KEYS
from tandem.architecture.families.state_space import CHUNK_KEYS, read_kinds, read_state_space
from tandem.architecture.feed_forward import FeedForwardSpec, GatedSpec, MixtureOfExpertsSpec, RouterSpec, Score
from tandem.architecture.fields import MAX_COUNT, Fields
from tandem.architecture.mixers import MixerSpec
from tandem.architecture.model import ModelSpec
from tandem.architecture.rope import RopeSpec
from tandem.architecture.tensors import LinearSpec

_UNUSED_KEYS = (*CHUNK_KEYS, "normalization_function", "init_method", "embedding_init_range")
_ROPE = "rope"


def _read_model(fields: Fields) -> ModelSpec:
    sizes = base.read_sizes(fields, granite.DEFAULTS)
    width = fields.count("shared_intermediate_size", 1024, high=1 << 20)
    mixers, blocks = _read_mixers(fields, sizes), read_blocks(fields, sizes, width)
    layers = base.pre_norm_layers(sizes, mixers, blocks)
    model = granite.build_model("granite_hybrid", fields, sizes, layers)
    base.check_unread(fields, (*_UNUSED_KEYS, *TRAINING_KEYS))
    return model


def _read_mixers(fields: Fields, sizes: base.Sizes) -> list[MixerSpec]:
    inner = fields.count("mamba_expand", 2, high=64) * sizes.hidden
    state_space, rope = read_state_space(fields, sizes, inner), _read_rope(fields, sizes)
    kinds = read_kinds(fields, sizes.num_layers, ("linear_attention", "mamba"), (base.FULL, "attention"))
    scale, bias = fields.number("attention_multiplier", 1.0), fields.flag("attention_bias", False)
    return [
        state_space.mixer(f"{base.layer_prefix(index)}.mamba")
        if is_recurrent
        else base.attention(sizes, index, rope, scale=scale, qkv_bias=bias, output_bias=bias)
        for index, is_recurrent in enumerate(kinds)
    ]


def _read_rope(fields: Fields, sizes: base.Sizes) -> RopeSpec | None:
    """None = positions are not encoded, as in all published files with recurrent layers."""
    rope = sizes.rope(fields)
    return rope if fields.text("position_embedding_type") == _ROPE else None


def read_blocks(fields: Fields, sizes: base.Sizes, width: int | None = None) -> list[FeedForwardSpec]:
    """A gated block of that width for every token, and beside it experts where there are any; None = experts alone.

    Raises:
        CorruptCheckpointError: there is neither.
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
    """A gated block whose gate and up are one tensor, gate first; `expert`: its entry in a stack of such blocks."""
    name = prefix if expert is None else f"{prefix}.{expert}"
    plain = base.gated(sizes, name, width)
    named = replace(plain, down=replace(plain.down, name=f"{name}.output_linear"))
    return from_stack(named, prefix, expert, "input_linear.weight", "output_linear.weight")


FAMILY = base.Family(_read_model)
