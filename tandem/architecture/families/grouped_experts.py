"""Reads mixtures of experts in groups, with shared experts and some dense first layers, with the keys and tensor names
of DeepSeek, for several families (DeepSeek, GLM, Kimi, Mistral 4).

A router may choose by scores plus a correction of each expert, which does not count for the weights.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from tandem.architecture.families import base
from tandem.architecture.families.experts import (
    TRAINING_KEYS,
    mixture_of_experts,
    read_num_experts,
    stacked_experts,
)
from tandem.architecture.feed_forward import MixtureOfExpertsSpec, RouterSpec, Score
from tandem.architecture.fields import REQUIRED, Fields
from tandem.architecture.mixers import MixerSpec
from tandem.architecture.model import ModelSpec, MtpNames
from tandem.architecture.tensors import LinearSpec, TensorSpec

UNUSED_KEYS: Final = (*TRAINING_KEYS, "aux_loss_alpha", "seq_aux", "ep_size")  # of configurations; change no result
_DENSE, _SPARSE = "dense", "sparse"
_EPSILON = 1e-20


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingDefaults:
    """Values that transformers assumes for absent keys. `width`: inner elements of an expert. `num_dense`: number of
    first layers without experts.
    """

    num_experts: int
    width: int
    num_shared: int = 1
    top_k: int = REQUIRED
    num_groups: int = 1
    top_groups: int = 1
    num_dense: int
    scale: float = 1.0


def sigmoid_router(fields: Fields, sizes: base.Sizes, defaults: RoutingDefaults) -> RouterSpec:
    """Router with sigmoid scores and a correction, within the best groups (DeepSeek-V3). Its names have no prefix."""
    fields.only("scoring_func", ("sigmoid",), "sigmoid")
    fields.only("topk_method", ("noaux_tc",), "noaux_tc")
    num_experts, num_groups, top_groups = read_groups(fields, defaults)
    return RouterSpec(
        linear=LinearSpec("gate", num_experts, sizes.hidden, is_float32=True),
        top_k=read_top_k(fields, defaults, top_groups * num_experts // num_groups),
        score=Score.SIGMOID,
        correction=TensorSpec("gate.e_score_correction_bias", (num_experts,), is_float32=True),
        renormalise=fields.flag("norm_topk_prob", True),
        epsilon=_EPSILON,
        scale=fields.number("routed_scaling_factor", defaults.scale),
        num_groups=num_groups,
        top_groups=top_groups,
    )


def read_groups(fields: Fields, defaults: RoutingDefaults, least: int = 2) -> tuple[int, int, int]:
    """Reads the numbers of experts, groups, and groups chosen for a token. `least`: minimum experts per group."""
    num_experts = read_num_experts(fields, defaults.num_experts)
    num_groups = fields.optional_count("n_group", defaults.num_groups, high=num_experts) or 1
    if num_experts % num_groups or (num_groups > 1 and num_experts < least * num_groups):
        raise fields.wrong(
            "n_group", f"1, or a divisor of the {num_experts} experts that leaves {least} or more a group"
        )
    return num_experts, num_groups, fields.optional_count("topk_group", defaults.top_groups, high=num_groups) or 1


def read_top_k(fields: Fields, defaults: RoutingDefaults, num_reachable: int) -> int:
    """Reads the number of experts chosen for a token; `num_reachable`: the number in its chosen groups."""
    return fields.count("num_experts_per_tok", defaults.top_k, high=num_reachable)


def read_blocks(
    fields: Fields,
    sizes: base.Sizes,
    router: RouterSpec,
    defaults: RoutingDefaults,
    *,
    dense: Sequence[bool] | None = None,
    are_stacked: bool = False,
    num_mtp_layers: int = 0,
) -> list[MixtureOfExpertsSpec | None]:
    """Reads the experts of each layer; None = a gated block of the usual size.

    Args:
        router: the router, whose names have no prefix.
        dense: for each layer, whether it has no experts; None = the number of first ones is read.
        are_stacked: the experts of a layer are stored as one stack.
        num_mtp_layers: additional layers after the last one, all with experts.
    """
    fields.only("moe_layer_freq", (1,), "1 (experts in every layer behind the dense ones)")
    width = fields.count("moe_intermediate_size", defaults.width, high=1 << 20)
    num_shared = fields.count("n_shared_experts", defaults.num_shared, low=0, high=64)
    if dense is None:
        num_dense = fields.count("first_k_dense_replace", defaults.num_dense, low=0)
        dense = [index < num_dense for index in range(sizes.num_layers)]
    return [
        None if is_dense else _block(sizes, index, router, width, num_shared, are_stacked)
        for index, is_dense in enumerate([*dense, *[False] * num_mtp_layers])
    ]


def read_dense(fields: Fields, num_layers: int, num_dense: int) -> list[bool]:
    """Reads which layers have no experts, from `mlp_layer_types`; when absent, the first `num_dense` layers.

    NOTE: transformers ignores `first_k_dense_replace` if both are given, so it must agree.
    """
    types = fields.texts("mlp_layer_types")
    if types is None:
        types = tuple(_DENSE if index < num_dense else _SPARSE for index in range(num_layers))
    if not {*types} <= {_DENSE, _SPARSE}:
        raise fields.wrong("mlp_layer_types", f"a list of {_DENSE} and {_SPARSE}")
    first = next((index for index, name in enumerate(types) if name != _DENSE), num_layers)
    given = fields.optional_count("first_k_dense_replace", first, low=0)
    if given is not None and min(given, num_layers) != first:
        raise fields.unsupported("first_k_dense_replace", f"{first}, as mlp_layer_types has it")
    return [name == _DENSE for name in types]


def mtp_layer_prefixes(fields: Fields, sizes: base.Sizes) -> tuple[str, ...]:
    """Prefixes of the tensors of additional layers that predict further tokens (MTP)."""
    num_mtp_layers = max(fields.count(name, 1, low=0) for name in ("num_nextn_predict_layers", "num_mtp_layers"))
    return tuple(f"{base.layer_prefix(sizes.num_layers + index)}." for index in range(num_mtp_layers))


def build_model(
    family: str,
    fields: Fields,
    sizes: base.Sizes,
    attention: Callable[[int], MixerSpec],
    routing: RoutingDefaults,
    *,
    dense: Sequence[bool] | None = None,
    serves_mtp: bool = True,
) -> ModelSpec:
    """The model with the mixers that `attention` returns by layer index, and experts chosen by `sigmoid_router`.

    Args:
        dense: as in `read_blocks`.
        serves_mtp: additional layers after the last one may predict further tokens; else they are left out.
    """
    router, unserved = sigmoid_router(fields, sizes, routing), mtp_layer_prefixes(fields, sizes)
    num_mtp_layers = len(unserved) if serves_mtp else 0
    blocks = read_blocks(fields, sizes, router, routing, dense=dense, num_mtp_layers=num_mtp_layers)
    layers = tuple(base.pre_norm_layer(sizes, index, attention(index), block) for index, block in enumerate(blocks))
    served, mtp_layers = layers[: sizes.num_layers], layers[sizes.num_layers :]
    prefix = base.layer_prefix(sizes.num_layers)
    names = MtpNames(f"{prefix}.enorm", f"{prefix}.hnorm", f"{prefix}.eh_proj", f"{prefix}.shared_head.norm")
    return base.build_model(
        family,
        fields,
        sizes,
        served,
        unserved=unserved,
        mtp_layers=mtp_layers,
        mtp_names=names if serves_mtp else None,
    )


def _block(
    sizes: base.Sizes, index: int, router: RouterSpec, width: int, num_shared: int, are_stacked: bool
) -> MixtureOfExpertsSpec:
    prefix = f"{base.layer_prefix(index)}.mlp"
    shared = base.gated(sizes, f"{prefix}.shared_experts", width * num_shared) if num_shared else None
    if are_stacked:
        experts = stacked_experts(sizes, f"{prefix}.experts", router.num_experts, width)
        return MixtureOfExpertsSpec(router=router.under(prefix), experts=experts, shared=shared)
    return mixture_of_experts(sizes, prefix, router, width, shared)
