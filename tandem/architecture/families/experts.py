"""Builds specs of mixtures of experts with tensor names that several families share (Qwen, GLM, Mixtral, gpt-oss).

The tensor names of a given `router` have no prefix: `mixture_of_experts` and `mixtral_experts` add it.
"""

from typing import Final

from tandem.architecture.expert_stacks import from_alternating_stack, from_stack
from tandem.architecture.families import base
from tandem.architecture.feed_forward import GatedSpec, MixtureOfExpertsSpec, RouterSpec
from tandem.architecture.fields import Fields
from tandem.architecture.tensors import LinearSpec, ShardAxis

TRAINING_KEYS: Final = ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise")  # change no result
_NAMES = ("num_experts", "num_local_experts", "n_routed_experts")  # `transformers` takes each for the others
_MAX_EXPERTS = 1 << 12


def read_num_experts(fields: Fields, default: int) -> int:
    """Number of experts of a layer, under any of the keys that configurations use for it."""
    given = [name for name in _NAMES if fields.get(name) is not None]
    return fields.count(given[0], high=_MAX_EXPERTS) if given else default


def mixture_of_experts(
    sizes: base.Sizes, prefix: str, router: RouterSpec, intermediate: int, shared: GatedSpec | None = None
) -> MixtureOfExpertsSpec:
    """Experts with tensors `{prefix}.experts.{i}`, named as in Qwen and GLM. `intermediate`: inner size of each."""
    experts = tuple(
        base.gated(sizes, f"{prefix}.experts.{expert}", intermediate) for expert in range(router.num_experts)
    )
    return MixtureOfExpertsSpec(router=router.under(prefix), experts=experts, shared=shared)


def mixtral_experts(
    sizes: base.Sizes, prefix: str, router: RouterSpec, intermediate: int | None = None
) -> MixtureOfExpertsSpec:
    """Experts with tensors `{prefix}.experts.{i}`, named as in Mixtral. `intermediate`: as in `mixtral_gated`."""
    experts = tuple(
        mixtral_gated(sizes, f"{prefix}.experts.{expert}", intermediate) for expert in range(router.num_experts)
    )
    return MixtureOfExpertsSpec(router=router.under(prefix), experts=experts)


def mixtral_gated(sizes: base.Sizes, prefix: str, intermediate: int | None = None) -> GatedSpec:
    """A gated block with tensors w1 (gate), w3 (up) and w2 (down). `intermediate`: None = `intermediate_size`."""
    width = sizes.intermediate if intermediate is None else intermediate
    return GatedSpec(
        gate=LinearSpec(f"{prefix}.w1", width, sizes.hidden),
        up=LinearSpec(f"{prefix}.w3", width, sizes.hidden),
        down=LinearSpec(f"{prefix}.w2", sizes.hidden, width, axis=ShardAxis.ROW),
        activation=sizes.activation,
    )


def stacked_experts(sizes: base.Sizes, prefix: str, num_experts: int, intermediate: int) -> tuple[GatedSpec, ...]:
    """Experts whose matrices are in two stacks per layer, `gate_up_proj` and `down_proj`, under `prefix`."""
    return tuple(
        from_stack(base.gated(sizes, f"{prefix}.{expert}", intermediate), prefix, expert)
        for expert in range(num_experts)
    )


def alternating_experts(sizes: base.Sizes, prefix: str, num_experts: int) -> tuple[GatedSpec, ...]:
    """Experts with biases, of `intermediate_size` elements, stored in stacks like those of gpt-oss."""
    return tuple(
        from_alternating_stack(base.gated(sizes, f"{prefix}.{expert}", bias=True), prefix, expert)
        for expert in range(num_experts)
    )
