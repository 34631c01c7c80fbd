"""MixtralForCausalLM: reads Mixtral's `config.json` into a `ModelSpec`: as `mistral`, but with no window unless
configured, and experts in every layer.
"""

from tandem.architecture.families import base
from tandem.architecture.families.experts import TRAINING_KEYS, mixtral_experts, read_num_experts
from tandem.architecture.feed_forward import RouterSpec, Score
from tandem.architecture.fields import Fields
from tandem.architecture.model import ModelSpec
from tandem.architecture.tensors import LinearSpec

_DEFAULTS = base.Defaults(
    max_positions=4096 * 32,
    kv_heads=8,
    eos_token_id=2,
    bos_token_id=1,
    eps=1e-5,
    theta=1e6,
    hidden=4096,
    intermediate=14336,
    layers=32,
    heads=32,
    vocab=32000,
)


def _read_model(fields: Fields) -> ModelSpec:
    sizes = base.read_sizes(fields, _DEFAULTS)
    window, rope = fields.optional_count("sliding_window"), sizes.rope(fields)
    num_experts = read_num_experts(fields, 8)
    router = RouterSpec(
        linear=LinearSpec("gate", num_experts, sizes.hidden),
        top_k=fields.count("num_experts_per_tok", 2, high=num_experts),
        score=Score.SOFTMAX,
        renormalise=True,
    )
    layers = [
        base.pre_norm_layer(
            sizes,
            index,
            base.attention(sizes, index, rope, window=window),
            mixtral_experts(sizes, f"{base.layer_prefix(index)}.block_sparse_moe", router),
        )
        for index in range(sizes.num_layers)
    ]
    model = base.build_model("mixtral", fields, sizes, layers)
    base.check_unread(fields, TRAINING_KEYS)
    return model


FAMILY = base.Family(_read_model)  # found by `registry`
