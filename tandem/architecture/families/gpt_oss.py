"""GptOssForCausalLM: reads gpt-oss's `config.json` into a `ModelSpec`: attention sinks, a window on every other layer,
experts with biases and clamped activations.
"""

from dataclasses import replace

from tandem.architecture.families import base
from tandem.architecture.families.experts import TRAINING_KEYS, alternating_experts, read_num_experts
from tandem.architecture.families.windows import read_types, read_windows
from tandem.architecture.feed_forward import Clamp, MixtureOfExpertsSpec, RouterSpec, Score
from tandem.architecture.fields import Fields
from tandem.architecture.mixers import AttentionSpec
from tandem.architecture.model import ModelSpec
from tandem.architecture.rope import RopeSpec
from tandem.architecture.tensors import LinearSpec, TensorSpec

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
    bias, rope = fields.flag("attention_bias", True), sizes.rope(fields, default=_DEFAULT_ROPE)
    blocks = _read_blocks(fields, sizes)
    layers = [
        base.pre_norm_layer(sizes, index, _attention(sizes, index, rope, window, bias), block)
        for index, (window, block) in enumerate(zip(windows, blocks, strict=True))
    ]
    model = base.build_model("gpt_oss", fields, sizes, layers)
    base.check_unread(fields, (*TRAINING_KEYS, *_COPIES))
    return model


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
        experts = alternating_experts(sizes, f"{prefix}.experts", num_experts)
        clamped = tuple(replace(expert, clamp=clamp) for expert in experts)
        return MixtureOfExpertsSpec(router=router.under(prefix), experts=clamped)

    return [block(index) for index in range(sizes.num_layers)]


FAMILY = base.Family(_read_model)  # found by `registry`
