"""Reads the mixtures of experts of DeepSeek-V4, whose first layers choose experts by token id alone; activations are
clamped.
"""

from dataclasses import replace

from tandem.architecture.families import base
from tandem.architecture.families.experts import mixture_of_experts, read_num_experts
from tandem.architecture.feed_forward import Clamp, GatedSpec, MixtureOfExpertsSpec, RouterSpec, Score
from tandem.architecture.fields import Fields
from tandem.architecture.tensors import LinearSpec, TensorSpec

_BY_TOKEN, _BY_SCORE = "hash_moe", "moe"
_SCORES = {"sqrtsoftplus": Score.SQRT_SOFTPLUS, "sigmoid": Score.SIGMOID}
_FORM = {"norm_topk_prob": (True,), "topk_method": ("noaux_tc",), "n_shared_experts": (1,), "n_group": (1,)}
"""What other files of the family might say, and transformers' model does not heed."""


def read_blocks(fields: Fields, sizes: base.Sizes) -> list[MixtureOfExpertsSpec]:
    """Reads the experts of each layer, with a shared block."""
    for name, accepted in _FORM.items():
        fields.only(name, accepted, " or ".join(map(str, accepted)))
    fields.only("hidden_act", ("silu", "swish"), "silu")  # NOTE: the only one that is clamped here
    clamp = Clamp(alpha=1.0, limit=fields.number("swiglu_limit", 10.0), shift=0.0)
    router = _read_router(fields, sizes)
    table = TensorSpec("gate.tid2eid", (sizes.vocab, router.top_k), is_lookup=True, code_dtype="int64")

    def block(index: int, kind: str) -> MixtureOfExpertsSpec:
        prefix = f"{base.layer_prefix(index)}.mlp"
        own = replace(router, correction=None, table=table) if kind == _BY_TOKEN else router
        shared = replace(base.gated(sizes, f"{prefix}.shared_experts"), clamp=clamp)
        mixture = mixture_of_experts(sizes, prefix, own, sizes.intermediate, shared)
        experts = tuple(replace(expert, clamp=clamp) for expert in mixture.experts if isinstance(expert, GatedSpec))
        return replace(mixture, experts=experts)

    return [block(index, kind) for index, kind in enumerate(_read_kinds(fields, sizes.num_layers))]


def _read_router(fields: Fields, sizes: base.Sizes) -> RouterSpec:
    """Reads the router of layers that choose by score; its names have no prefix."""
    name = fields.text("scoring_func", "sqrtsoftplus") or ""
    if name not in _SCORES:
        raise fields.unsupported("scoring_func", ", ".join(_SCORES))
    num_experts = read_num_experts(fields, 256)
    return RouterSpec(
        linear=LinearSpec("gate", num_experts, sizes.hidden),
        top_k=fields.count("num_experts_per_tok", 6, high=num_experts),
        score=_SCORES[name],
        correction=TensorSpec("gate.e_score_correction_bias", (num_experts,), is_float32=True),
        renormalise=True,
        epsilon=1e-20,
        scale=fields.number("routed_scaling_factor", 1.5),
    )


def _read_kinds(fields: Fields, num_layers: int) -> tuple[str, ...]:
    """Kind of choice in each layer, from `mlp_layer_types`; else the first `num_hash_layers` choose by token id."""
    first = fields.count("num_hash_layers", 3, low=0)
    kinds = fields.texts("mlp_layer_types")
    if kinds is None:
        return tuple(_BY_TOKEN if index < first else _BY_SCORE for index in range(num_layers))
    if not {*kinds} <= {_BY_TOKEN, _BY_SCORE}:
        raise fields.unsupported("mlp_layer_types", f"{_BY_TOKEN}, {_BY_SCORE}")
    return kinds
