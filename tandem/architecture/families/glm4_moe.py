"""Glm4MoeForCausalLM: GLM 4.5 to 4.7. Half of each head is rotated; experts are chosen by sigmoid with a correction.

Layers behind the last one predict further tokens; they are not served.
"""

from tandem.architecture.families import base
from tandem.architecture.families.experts import TRAINING_KEYS, mixture_of_experts, read_num_experts
from tandem.architecture.feed_forward import MixtureOfExpertsSpec, RouterSpec, Score
from tandem.architecture.fields import Fields
from tandem.architecture.model import ModelSpec
from tandem.architecture.tensors import LinearSpec, TensorSpec

_DEFAULTS = base.Defaults(
    max_positions=131_072,
    kv_heads=8,
    eps=1e-5,
    rotary_share=0.5,
    hidden=4096,
    intermediate=10944,
    layers=46,
    heads=96,
    vocab=151_552,
)
_EPSILON = 1e-20


def _read_model(fields: Fields) -> ModelSpec:
    sizes = base.read_sizes(fields, _DEFAULTS)
    rope, bias, norms = sizes.rope(fields), fields.flag("attention_bias", False), fields.flag("use_qk_norm", False)
    num_dense = fields.count("first_k_dense_replace", 1, low=0)
    router, width, num_shared = _read_router(fields, sizes)
    layers = [
        base.pre_norm_layer(
            sizes,
            index,
            base.attention(sizes, index, rope, qkv_bias=bias, head_norms=norms),
            None if index < num_dense else _block(sizes, index, router, width, num_shared),
        )
        for index in range(sizes.num_layers)
    ]
    num_further = max(fields.count(name, 1, low=0) for name in ("num_nextn_predict_layers", "num_mtp_layers"))
    further = tuple(f"{base.layer_prefix(sizes.num_layers + index)}." for index in range(num_further))
    model = base.build_model("glm4_moe", fields, sizes, layers, unserved=further)
    base.check_unread(fields, TRAINING_KEYS)
    return model


def _read_router(fields: Fields, sizes: base.Sizes) -> tuple[RouterSpec, int, int]:
    """The router of a layer, its names still without a prefix; inner elements of an expert; shared experts."""
    fields.only("scoring_func", ("sigmoid",), "sigmoid")
    fields.only("topk_method", ("noaux_tc",), "noaux_tc")
    num_experts = read_num_experts(fields, 128)
    num_groups = fields.count("n_group", 1, high=num_experts)
    if num_experts % num_groups or (num_groups > 1 and num_experts < 2 * num_groups):
        raise fields.wrong("n_group", f"1, or a divisor of the {num_experts} experts that leaves two or more a group")
    top_groups = fields.count("topk_group", 1, high=num_groups)
    num_reachable = top_groups * num_experts // num_groups
    router = RouterSpec(
        linear=LinearSpec("gate", num_experts, sizes.hidden, is_float32=True),
        top_k=fields.count("num_experts_per_tok", 8, high=num_reachable),
        score=Score.SIGMOID,
        correction=TensorSpec("gate.e_score_correction_bias", (num_experts,), is_float32=True),
        renormalise=fields.flag("norm_topk_prob", True),
        epsilon=_EPSILON,
        scale=fields.number("routed_scaling_factor", 1.0),
        num_groups=num_groups,
        top_groups=top_groups,
    )
    width = fields.count("moe_intermediate_size", 1408, high=1 << 20)
    return router, width, fields.count("n_shared_experts", 1, low=0, high=64)


def _block(sizes: base.Sizes, index: int, router: RouterSpec, width: int, num_shared: int) -> MixtureOfExpertsSpec:
    prefix = f"{base.layer_prefix(index)}.mlp"
    shared = base.gated(sizes, f"{prefix}.shared_experts", width * num_shared) if num_shared else None
    return mixture_of_experts(sizes, prefix, router, width, shared)


FAMILY = base.Family(_read_model)
