"""Experts stored as two stacks a layer: `gate_up_proj` [experts, 2 * inner, hidden], gate first, and `down_proj`
[experts, hidden, inner].

Of some families there are checkpoints with stacks and others with a tensor for each expert, whatever the family's own
have: `with_stored_experts` goes by what is stored.
"""

from collections.abc import Collection
from dataclasses import replace

from tandem.architecture.feed_forward import GatedSpec, MixtureOfExpertsSpec
from tandem.architecture.model import LayerSpec, ModelSpec
from tandem.architecture.tensors import LinearSpec, Source

_GATE_UP, _DOWN, _FIRST = "gate_up_proj", "down_proj", ".0.gate_proj"


def from_stack(
    block: GatedSpec, prefix: str, index: int | None, gate_up: str = _GATE_UP, down: str = _DOWN
) -> GatedSpec:
    """The same, made of entry `index` of the stacks `gate_up` and `down` under `prefix`; None = each is one matrix."""
    inner, tensor = block.intermediate_size, f"{prefix}.{gate_up}"
    return replace(
        block,
        gate=replace(block.gate, weight_source=Source(tensor, index, start=0, stop=inner)),
        up=replace(block.up, weight_source=Source(tensor, index, start=inner, stop=2 * inner)),
        down=replace(block.down, weight_source=Source(f"{prefix}.{down}", index)),
    )


def from_alternating_stack(expert: GatedSpec, prefix: str, index: int) -> GatedSpec:
    """The same with biases, made of entry `index` of stacks under `prefix` whose matrices are transposed, gate and up
    taking turns in the columns, as gpt-oss has them in 16 bits.
    """

    def half(linear: LinearSpec, start: int) -> LinearSpec:
        return replace(
            linear,
            weight_source=Source(f"{prefix}.{_GATE_UP}", index, transposed=True, start=start, step=2),
            bias_source=Source(f"{prefix}.{_GATE_UP}_bias", index, start=start, step=2),
        )

    down = replace(
        expert.down,
        weight_source=Source(f"{prefix}.{_DOWN}", index, transposed=True),
        bias_source=Source(f"{prefix}.{_DOWN}_bias", index),
    )
    return replace(expert, gate=half(expert.gate, 0), up=half(expert.up, 1), down=down)


def with_stored_experts(model: ModelSpec, stored: Collection[str]) -> ModelSpec:
    """The model with its experts made of stacks or of tensors of their own, as a checkpoint with the tensors `stored`
    has them.
    """
    layers = tuple(layer_with_stored_experts(layer, stored) for layer in model.layers)
    return replace(model, layers=layers)


def layer_with_stored_experts(layer: LayerSpec, stored: Collection[str]) -> LayerSpec:
    """As `with_stored_experts`, of one layer."""
    block = layer.feed_forward
    if not isinstance(block, MixtureOfExpertsSpec):
        return layer
    gated = [expert for expert in block.experts if isinstance(expert, GatedSpec)]
    if len(gated) < len(block.experts):
        return layer
    first = gated[0].gate
    prefix, has_stacks = first.name.removesuffix(_FIRST), first.weight_source is not None
    if prefix == first.name:
        return layer
    if has_stacks and f"{first.name}.weight" in stored:
        experts = tuple(_by_itself(expert) for expert in gated)
    elif not has_stacks and f"{prefix}.{_GATE_UP}" in stored:
        experts = tuple(from_stack(expert, prefix, index) for index, expert in enumerate(gated))
    else:
        return layer
    return replace(layer, feed_forward=replace(block, experts=experts))


def _by_itself(expert: GatedSpec) -> GatedSpec:
    """The same, made of tensors of its own."""
    gate, up, down = (
        replace(linear, weight_source=None, bias_source=None) for linear in (expert.gate, expert.up, expert.down)
    )
    return replace(expert, gate=gate, up=up, down=down)
