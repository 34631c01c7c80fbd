"""Qwen3MoeForCausalLM: reads the `config.json` of Qwen 3's mixtures of experts into a `ModelSpec`: attention as in
`qwen3`, with one window for all layers, and experts in most layers.
"""

from tandem.architecture.families import base
from tandem.architecture.families.experts import TRAINING_KEYS, mixture_of_experts, read_num_experts
from tandem.architecture.families.qwen3 import read_attention
from tandem.architecture.feed_forward import MixtureOfExpertsSpec, RouterSpec, Score
from tandem.architecture.fields import Fields
from tandem.architecture.model import ModelSpec
from tandem.architecture.tensors import LinearSpec

_DEFAULTS = base.Defaults(
    max_positions=32768, kv_heads=4, hidden=2048, intermediate=6144, layers=24, heads=32, vocab=151_936
)
_DEFAULT_WINDOW = 4096


def _read_model(fields: Fields) -> ModelSpec:
    sizes = base.read_sizes(fields, _DEFAULTS)
    window = fields.optional_count("sliding_window", _DEFAULT_WINDOW)
    fields.get("max_window_layers")
    if not fields.flag("use_sliding_window", False):
        window = None
    mixers = read_attention(fields, sizes, (window,) * sizes.num_layers)
    blocks = read_blocks(fields, sizes, num_experts=128, top_k=8, width=768)
    layers = base.pre_norm_layers(sizes, mixers, blocks)
    model = base.build_model("qwen3_moe", fields, sizes, layers)
    base.check_unread(fields, TRAINING_KEYS)
    return model


def read_blocks(
    fields: Fields, sizes: base.Sizes, *, num_experts: int, top_k: int, width: int, renormalise: bool = False
) -> list[MixtureOfExpertsSpec | None]:
    """Reads the experts of each layer; None = the usual gated block. The arguments are the defaults of absent keys."""
    num_experts = read_num_experts(fields, num_experts)
    top_k = fields.count("num_experts_per_tok", top_k, high=num_experts)
    width = fields.count("moe_intermediate_size", width, high=1 << 20)
    step = fields.count("decoder_sparse_step", 1)
    dense = fields.indices("mlp_only_layers", sizes.num_layers)
    renormalise = fields.flag("norm_topk_prob", renormalise)

    def block(index: int) -> MixtureOfExpertsSpec | None:
        if index in dense or (index + 1) % step:
            return None
        prefix = f"{base.layer_prefix(index)}.mlp"
        router = RouterSpec(
            linear=LinearSpec("gate", num_experts, sizes.hidden),
            top_k=top_k,
            score=Score.SOFTMAX,
            renormalise=renormalise,
            rounded=True,
        )
        return mixture_of_experts(sizes, prefix, router, width)

    return [block(index) for index in range(sizes.num_layers)]


FAMILY = base.Family(_read_model)  # found by `registry`
