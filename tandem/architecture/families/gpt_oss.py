"""GptOssForCausalLM: sinks, a window on every other layer, experts with biases and clamps.

In 16 bits all experts of a layer are one tensor, transposed; gate and up take turns in its columns.
"""

from dataclasses import replace

from tandem.architecture.families import base
from tandem.architecture.families.experts import TRAINING_KEYS, read_num_experts
from tandem.architecture.families.windows import read_types, read_windows
from tandem.architecture.feed_forward import Clamp, GatedSpec, MixtureOfExpertsSpec, RouterSpec, Score
from tandem.architecture.fields import Fields
from tandem.architecture.mixers import AttentionSpec
from tandem.architecture.model import ModelSpec
from tandem.architecture.rope import RopeSpec, read_rope
from tandem.architecture.tensors import LinearSpec, ShardAxis, Source, TensorSpec

_DEFAULTS = base.Defaults(
    max_positions=131_072,
    kv_heads=8,
    head_dim=64,
    eps=1e-5,
    theta=150_000.0,
    hidden=2880,
    intermediate=2880,
    layers=36,
    heads=64,
    vocab=201_088,
)
_DEFAULT_WINDOW, _PATTERN = 128, 2
_DEFAULT_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_COPIES = ("experts_per_token", "initial_context_length")  # of keys that transformers reads


def _read_model(fields: Fields) -> ModelSpec:
    sizes = base.read_sizes(fields, _DEFAULTS)
    windows = read_windows(fields, read_types(fields, sizes.num_layers, _PATTERN), _DEFAULT_WINDOW)
    bias, rope = fields.flag("attention_bias", True), _read_rope(fields, sizes)
    blocks = _read_blocks(fields, sizes)
    layers = [
        base.pre_norm_layer(sizes, index, _attention(sizes, index, rope, window, bias), block)
        for index, (window, block) in enumerate(zip(windows, blocks, strict=True))
    ]
    model = base.build_model("gpt_oss", fields, sizes, layers)
    base.check_unread(fields, (*TRAINING_KEYS, *_COPIES))
    return model


def _read_rope(fields: Fields, sizes: base.Sizes) -> RopeSpec:
    scaling, parameters = fields.section("rope_scaling"), fields.section("rope_parameters")
    return read_rope(
        fields,
        scaling or parameters or Fields(_DEFAULT_ROPE, fields.where),
        head_dim=sizes.head_dim,
        max_positions=sizes.max_positions,
        default_theta=fields.number("rope_theta", sizes.defaults.theta),
    )


def _attention(sizes: base.Sizes, index: int, rope: RopeSpec, window: int | None, bias: bool) -> AttentionSpec:
    sinks = TensorSpec(f"{base.layer_prefix(index)}.self_attn.sinks", (sizes.num_heads,), is_float32=True)
    mixer = base.attention(sizes, index, rope, window=window, qkv_bias=bias, output_bias=bias)
    return replace(mixer, sinks=sinks)


def _read_blocks(fields: Fields, sizes: base.Sizes) -> list[MixtureOfExpertsSpec]:
    num_experts = read_num_experts(fields, 128)
    router = RouterSpec(
        linear=LinearSpec("router", num_experts, sizes.hidden, bias=True),
        top_k=fields.count("num_experts_per_tok", 4, high=num_experts),
        score=Score.SOFTMAX_OF_CHOSEN,
        rounded=True,
    )
    clamp = Clamp(alpha=fields.number("swiglu_alpha", 1.702), limit=fields.number("swiglu_limit", 7.0))

    def block(index: int) -> MixtureOfExpertsSpec:
        prefix = f"{base.layer_prefix(index)}.mlp"
        experts = tuple(_expert(sizes, f"{prefix}.experts", expert, clamp) for expert in range(num_experts))
        return MixtureOfExpertsSpec(router=router.under(prefix), experts=experts)

    return [block(index) for index in range(sizes.num_layers)]


def _expert(sizes: base.Sizes, prefix: str, expert: int, clamp: Clamp) -> GatedSpec:
    def half(name: str, start: int) -> LinearSpec:
        return LinearSpec(
            f"{prefix}.{expert}.{name}",
            sizes.intermediate,
            sizes.hidden,
            bias=True,
            weight_source=Source(f"{prefix}.gate_up_proj", expert, transposed=True, start=start, step=2),
            bias_source=Source(f"{prefix}.gate_up_proj_bias", expert, start=start, step=2),
        )

    down = LinearSpec(
        f"{prefix}.{expert}.down_proj",
        sizes.hidden,
        sizes.intermediate,
        bias=True,
        axis=ShardAxis.ROW,
        weight_source=Source(f"{prefix}.down_proj", expert, transposed=True),
        bias_source=Source(f"{prefix}.down_proj_bias", expert),
    )
    return GatedSpec(half("gate_proj", 0), half("up_proj", 1), down, sizes.activation, clamp)


FAMILY = base.Family(_read_model)
