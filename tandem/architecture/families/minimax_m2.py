"""MiniMaxM2ForCausalLM: reads MiniMax-M2's `config.json` into a `ModelSpec`: norms over all heads of q and k, part of
each head rotated, experts chosen by sigmoid in every layer.
"""

from tandem.architecture.families import base
from tandem.architecture.families.experts import TRAINING_KEYS, mixtral_experts, read_num_experts
from tandem.architecture.feed_forward import MixtureOfExpertsSpec, RouterSpec, Score
from tandem.architecture.fields import Fields
from tandem.architecture.model import ModelSpec
from tandem.architecture.tensors import LinearSpec, TensorSpec

_DEFAULTS = base.Defaults(
    max_positions=196_608,
    kv_heads=8,
    head_dim=128,
    eos_token_id=200_020,
    bos_token_id=200_034,
    theta=5e6,
    rotary_share=1.0,
    hidden=3072,
    intermediate=1536,
    layers=62,
    heads=48,
    vocab=200_064,
)

_FULL_ATTENTION = 1
_PREDICTION_KEYS = ("use_mtp", "num_mtp_modules", "mtp_transformer_layers")  # of layers that are not published


def _read_model(fields: Fields) -> ModelSpec:
    sizes = base.read_sizes(fields, _DEFAULTS)
    _check_form(fields)
    rotary_dim = fields.optional_count("rotary_dim", high=sizes.head_dim)
    share = None if rotary_dim is None else rotary_dim / sizes.head_dim
    rope = sizes.rope(fields, share)
    num_experts = read_num_experts(fields, 256)
    top_k = fields.count("num_experts_per_tok", 8, high=num_experts)
    layers = [
        base.pre_norm_layer(
            sizes,
            index,
            base.attention(sizes, index, rope, whole_norms=True),
            _block(sizes, index, num_experts, top_k),
        )
        for index in range(sizes.num_layers)
    ]
    model = base.build_model("minimax_m2", fields, sizes, layers)
    base.check_unread(fields, (*TRAINING_KEYS, *_PREDICTION_KEYS))
    return model


def _check_form(fields: Fields) -> None:
    """Refuses options that MiniMax's own code computes and transformers' model does not."""
    fields.only("scoring_func", ("sigmoid",), "sigmoid")
    fields.only("use_routing_bias", (True,), "true")
    fields.only("use_qk_norm", (True,), "true")
    fields.only("qk_norm_type", ("per_layer",), "per_layer")
    if not set(fields.indices("attn_type_list", 2)) <= {_FULL_ATTENTION}:
        raise fields.unsupported("attn_type_list", f"{_FULL_ATTENTION} (full attention) throughout")


def _block(sizes: base.Sizes, index: int, num_experts: int, top_k: int) -> MixtureOfExpertsSpec:
    router = RouterSpec(
        linear=LinearSpec("gate", num_experts, sizes.hidden),
        top_k=top_k,
        score=Score.SIGMOID,
        correction=TensorSpec("e_score_correction_bias", (num_experts,), is_float32=True),
        renormalise=True,
    )
    return mixtral_experts(sizes, f"{base.layer_prefix(index)}.block_sparse_moe", router)


FAMILY = base.Family(_read_model)  # found by `registry`
