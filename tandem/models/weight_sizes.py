"""Memory of a quantised model's weights and the arithmetic of its products, from the formats that the loader chooses.

Reads the configuration and, if the checkpoint is on this machine, the headers of its files. No weight is read.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tandem.architecture.cost import ModelCost, Products, WeightShare
from tandem.architecture.expert_stacks import with_stored_blocks
from tandem.architecture.feed_forward import MixtureOfExpertsSpec, ParallelSpec
from tandem.architecture.fields import Fields
from tandem.architecture.model import ModelSpec
from tandem.architecture.registry import find_family
from tandem.architecture.tensors import TensorSpec, num_matrix_elements
from tandem.compute.torch.kernels import TorchKernels
from tandem.compute.weights.base import StoredTensors
from tandem.compute.weights.formats import products_with, read_formats
from tandem.core.errors import CheckpointError
from tandem.models.checkpoint import open_checkpoint
from tandem.models.load_plan import LoadingPlan, num_bytes_of
from tandem.models.weights import stored_names, stored_tensors

_DTYPE = "bfloat16"  # of what is not quantised


def quantised_cost(cost: ModelCost, fields: Fields, directory: Path | None) -> ModelCost:
    """`cost` with the bits and products of the weights of a quantised checkpoint.

    Args:
        fields: its `config.json`.
        directory: where its files may be; None, or without weights: formats follow from the configuration alone.

    Raises:
        CheckpointError: the loader would refuse the configuration.
    """
    stored = None if directory is None else _stored(fields, directory)
    spec = cost.model if stored is None else with_stored_blocks(cost.model, stored)
    plan = LoadingPlan.of(spec, read_formats(fields, TorchKernels(), stored))
    sizes = _bytes_by_name(plan)
    experts, lookups = _experts(spec), [tensor for tensor in spec.tensors() if tensor.is_lookup]
    return replace(
        cost,
        weight_bits=8 * sum(sizes.values()) / num_matrix_elements(spec.tensors()),
        expert_bits=_mean_bits(experts, sizes),
        lookup_bits=_mean_bits(lookups, sizes),
        shares=_shares(plan),
    )


def _stored(fields: Fields, directory: Path) -> StoredTensors | None:
    """Tensors of the checkpoint in `directory`; None = it has none that can be opened."""
    try:
        checkpoint = open_checkpoint(directory)
    except CheckpointError:
        return None
    found = stored_tensors(checkpoint, stored_names(checkpoint, find_family(fields).parameter_name))
    checkpoint.release()
    return found


def _bytes_by_name(plan: LoadingPlan) -> dict[str, int]:
    """Bytes in memory of each matrix, by its name; a tied head has none of its own."""
    sizes = {tensor.name: num_bytes_of(tensor, _DTYPE) for tensor in plan.tensors if len(tensor.shape) > 1}
    for weight, weight_format in plan.weights:
        if weight.source is None or weight.source.tensor not in sizes:
            sizes[weight.name] = sum(num_bytes_of(each, _DTYPE) for each in weight_format.memory_tensors(weight))
    return sizes


def _experts(spec: ModelSpec) -> list[TensorSpec]:
    """Matrices of all routed experts."""
    found: list[TensorSpec] = []
    for layer in spec.layers:
        whole = layer.feed_forward
        for block in (branch.block for branch in whole.branches) if isinstance(whole, ParallelSpec) else (whole,):
            if isinstance(block, MixtureOfExpertsSpec):
                found += (tensor for expert in block.experts for tensor in expert.tensors())
    return found


def _mean_bits(tensors: Sequence[TensorSpec], sizes: Mapping[str, int]) -> float | None:
    """Bits of one number; None = there are no such matrices."""
    num_elements = num_matrix_elements(tensors)
    return 8 * sum(sizes.get(tensor.name, 0) for tensor in tensors) / num_elements if num_elements else None


def _shares(plan: LoadingPlan) -> tuple[WeightShare, ...]:
    """Kinds of products of all linear maps, with their shares of the weights; the largest is the first."""
    found: Counter[Products] = Counter()
    for weight, weight_format in plan.weights:
        found[products_with(weight, weight_format)] += weight.size
    return tuple(WeightShare(kind, size / found.total()) for kind, size in found.most_common())
