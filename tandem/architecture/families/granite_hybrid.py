"""GraniteMoeHybridForCausalLM: Granite 4. Mamba-2 layers, and attention in a few; the multipliers of Granite 3."""

from dataclasses import replace

from tandem.architecture.families import base
from tandem.architecture.families.experts import TRAINING_KEYS
from tandem.architecture.families.state_space import CHUNK_KEYS, read_kinds, read_state_space
from tandem.architecture.feed_forward import FeedForwardSpec, GatedSpec, MixtureOfExpertsSpec, RouterSpec, Score
from tandem.architecture.fields import MAX_COUNT, Fields
from tandem.architecture.mixers import MixerSpec
from tandem.architecture.model import ModelSpec
from tandem.architecture.rope import RopeSpec
from tandem.architecture.tensors import LinearSpec, ShardAxis, Source

_DEFAULTS = base.Defaults(
    max_positions=2048,
    eos_token_id=2,
    bos_token_id=1,
    hidden=4096,
    intermediate=11_008,
    layers=32,
    heads=32,
    vocab=32_000,
)
_UNUSED_KEYS = (*CHUNK_KEYS, "normalization_function", "init_method", "embedding_init_range")
_ROPE = "rope"


def _read_model(fields: Fields) -> ModelSpec:
    sizes = base.read_sizes(fields, _DEFAULTS)
    mixers, blocks = _read_mixers(fields, sizes), _read_blocks(fields, sizes)
    residual_scale = fields.number("residual_multiplier", 1.0)
    layers = [
        replace(base.pre_norm_layer(sizes, index, mixer, block), residual_scale=residual_scale)
        for index, (mixer, block) in enumerate(zip(mixers, blocks, strict=True))
    ]
    model = base.build_model(
        "granite_hybrid",
        fields,
        sizes,
        layers,
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        logit_scale=1.0 / fields.number("logits_scaling", 1.0),
    )
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


def _read_blocks(fields: Fields, sizes: base.Sizes) -> list[FeedForwardSpec]:
    """A gated block for every token, and beside it experts where there are any."""
    width = fields.count("shared_intermediate_size", 1024, high=1 << 20)
    num_experts = fields.count("num_local_experts", 8, low=0, high=1 << 12)
    top_k = fields.count("num_experts_per_tok", 2, low=min(1, num_experts), high=num_experts or MAX_COUNT)
    router = RouterSpec(
        linear=LinearSpec("router.layer", num_experts, sizes.hidden),
        top_k=top_k,
        score=Score.SOFTMAX_OF_CHOSEN,
        rounded=True,
    )

    def block(index: int) -> FeedForwardSpec:
        prefix = base.layer_prefix(index)
        shared = _gated(sizes, f"{prefix}.shared_mlp", width, None)
        if not num_experts:
            return shared
        name = f"{prefix}.block_sparse_moe"
        experts = [_gated(sizes, name, sizes.intermediate, expert) for expert in range(num_experts)]
        return MixtureOfExpertsSpec(router=router.under(name), experts=tuple(experts), shared=shared)

    return [block(index) for index in range(sizes.num_layers)]


def _gated(sizes: base.Sizes, prefix: str, width: int, expert: int | None) -> GatedSpec:
    """A gated block whose gate and up are one tensor, gate first; `expert`: its entry in a stack of such blocks."""
    name = prefix if expert is None else f"{prefix}.{expert}"

    def half(part: str, start: int) -> LinearSpec:
        source = Source(f"{prefix}.input_linear.weight", expert, start=start, stop=start + width)
        return LinearSpec(f"{name}.{part}", width, sizes.hidden, weight_source=source)

    down = Source(f"{prefix}.output_linear.weight", expert)
    return GatedSpec(
        gate=half("gate_proj", 0),
        up=half("up_proj", width),
        down=LinearSpec(f"{name}.output_linear", sizes.hidden, width, axis=ShardAxis.ROW, weight_source=down),
        activation=sizes.activation,
    )


FAMILY = base.Family(_read_model)
