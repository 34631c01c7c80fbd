"""Sources of feed-forward weights in a checkpoint: experts in two stacks per layer, `gate_up_proj` [experts, 2 * inner,
hidden] with gate first and `down_proj` [experts, hidden, inner], or as one tensor per matrix.

Some families have checkpoints of both kinds, so `with_stored_blocks` adapts a model to the tensors a checkpoint has.
"""

from collections.abc import Collection
from dataclasses import replace

from tandem.architecture.feed_forward import BranchSpec, FeedForwardSpec, GatedSpec, MixtureOfExpertsSpec, ParallelSpec
from tandem.architecture.model import LayerSpec, ModelSpec
from tandem.architecture.tensors import LinearSpec, Source

_GATE_UP, _DOWN, _FIRST = "gate_up_proj", "down_proj", ".0.gate_proj"


def from_stack(
    block: GatedSpec, prefix: str, index: int | None, gate_up: str = _GATE_UP, down: str = _DOWN
) -> GatedSpec:
    """`block` with its weights taken from the stacks `gate_up` and `down` under `prefix`, at `index`. With index None
    the two tensors are no stacks but the matrices of a single block.
    """
    inner, tensor = block.intermediate_size, f"{prefix}.{gate_up}"
    return replace(
        block,
        gate=replace(block.gate, weight_source=Source(tensor, index, start=0, stop=inner)),
        up=replace(block.up, weight_source=Source(tensor, index, start=inner, stop=2 * inner)),
        down=replace(block.down, weight_source=Source(f"{prefix}.{down}", index)),
    )


def from_alternating_stack(expert: GatedSpec, prefix: str, index: int) -> GatedSpec:
    """`expert` with weights and biases taken from stacks under `prefix`, at `index`, whose matrices are transposed and
    have gate and up in alternating columns, as in the 16-bit checkpoints of gpt-oss.
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


def with_stored_blocks(model: ModelSpec, stored: Collection[str]) -> ModelSpec:
    """The model with the sources of its feed-forward weights changed to stacks, fused tensors or one tensor per matrix,
    whichever of them `stored`, the names of a checkpoint's tensors, has.
    """
    modules = _modules(stored)
    return replace(model, layers=tuple(_layer_as_stored(layer, modules) for layer in model.layers))


def layer_with_stored_blocks(layer: LayerSpec, stored: Collection[str]) -> LayerSpec:
    """As `with_stored_blocks`, for one layer."""
    return _layer_as_stored(layer, _modules(stored))


def _modules(stored: Collection[str]) -> frozenset[str]:
    """Names of the modules that have tensors of their own, in any format; the name of a stack is among them."""
    return frozenset((*(name.rpartition(".")[0] for name in stored), *stored))


def _layer_as_stored(layer: LayerSpec, modules: Collection[str]) -> LayerSpec:
    return replace(layer, feed_forward=_as_stored(layer.feed_forward, modules))


def _as_stored(block: FeedForwardSpec | None, modules: Collection[str]) -> FeedForwardSpec | None:
    if isinstance(block, GatedSpec):
        return _by_itself(block) if _is_by_itself(block, modules) else block
    if isinstance(block, ParallelSpec):
        return replace(block, branches=tuple(_branch_as_stored(branch, modules) for branch in block.branches))
    return _experts_as_stored(block, modules) if isinstance(block, MixtureOfExpertsSpec) else block


def _branch_as_stored(branch: BranchSpec, modules: Collection[str]) -> BranchSpec:
    if not isinstance(branch.block, MixtureOfExpertsSpec):
        return branch
    return replace(branch, block=_experts_as_stored(branch.block, modules))


def _experts_as_stored(block: MixtureOfExpertsSpec, modules: Collection[str]) -> MixtureOfExpertsSpec:
    shared = block.shared
    if isinstance(shared, GatedSpec) and _is_by_itself(shared, modules):
        block = replace(block, shared=_by_itself(shared))
    gated = [expert for expert in block.experts if isinstance(expert, GatedSpec)]
    if len(gated) < len(block.experts):
        return block
    first = gated[0].gate
    prefix = first.name.removesuffix(_FIRST)
    if _is_by_itself(gated[0], modules):
        return replace(block, experts=tuple(_by_itself(expert) for expert in gated))
    if first.weight_source is not None or prefix == first.name or f"{prefix}.{_GATE_UP}" not in modules:
        return block
    return replace(block, experts=tuple(from_stack(expert, prefix, index) for index, expert in enumerate(gated)))


def _is_by_itself(block: GatedSpec, modules: Collection[str]) -> bool:
    """Whether a block whose matrices a family takes from parts of a tensor is stored with one tensor per matrix."""
    return block.gate.weight_source is not None and block.gate.name in modules


def _by_itself(expert: GatedSpec) -> GatedSpec:
    """`expert` with one tensor per matrix."""
    gate, up, down = (
        replace(linear, weight_source=None, bias_source=None) for linear in (expert.gate, expert.up, expert.down)
    )
    return replace(expert, gate=gate, up=up, down=down)
