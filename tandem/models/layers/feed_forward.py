"""Interface of feed-forward blocks, the choice of one by the type of its spec, and sums of several blocks."""

from collections.abc import Callable
from typing import Any, Protocol

import torch

from tandem.architecture.feed_forward import (
    FeedForwardSpec,
    GatedSpec,
    MixtureOfExpertsSpec,
    ParallelSpec,
    SquaredReluSpec,
)
from tandem.compute.ops import Kernels
from tandem.models.layers.experts import MixtureOfExperts
from tandem.models.layers.mlp import GatedMLP, SquaredReluMLP
from tandem.models.layers.norm import Norm
from tandem.models.parameters import Parameters


class FeedForward(Protocol):
    """A feed-forward block. `graph_safe`: whether a CUDA graph can capture it (no work on the host depends on data)."""

    graph_safe: bool

    def __call__(self, x: torch.Tensor, input_ids: torch.Tensor | None = None) -> torch.Tensor:
        """`x` [num_tokens, hidden] -> the same shape, in new memory.

        `input_ids`: int64 [num_tokens], the token ids; None = nothing in the block depends on them.
        """
        ...


class ParallelBlocks:
    """Computes a `ParallelSpec` with the tensors that it names."""

    def __init__(self, spec: ParallelSpec, parameters: Parameters, kernels: Kernels) -> None:
        self._branches = [
            (
                Norm.take_optional(branch.before, parameters, kernels),
                build_feed_forward(branch.block, parameters, kernels),
                Norm.take_optional(branch.after, parameters, kernels),
            )
            for branch in spec.branches
        ]
        self.graph_safe = all(block.graph_safe for _, block, _ in self._branches)

    def __call__(self, x: torch.Tensor, input_ids: torch.Tensor | None = None) -> torch.Tensor:
        """`x` [num_tokens, hidden] -> the same shape; added in the order of the branches."""
        first, *others = (_between(before, block, after, x, input_ids) for before, block, after in self._branches)
        for output in others:
            first.add_(output)
        return first


def _between(
    before: Norm | None, block: FeedForward, after: Norm | None, x: torch.Tensor, input_ids: torch.Tensor | None
) -> torch.Tensor:
    y = block(x if before is None else before(x), input_ids)
    return y if after is None else after(y)


def build_feed_forward(spec: FeedForwardSpec, parameters: Parameters, kernels: Kernels) -> FeedForward:
    """The block that computes `spec`."""
    return _BLOCKS[type(spec)](spec, parameters, kernels)


_BLOCKS: dict[type, Callable[[Any, Parameters, Kernels], FeedForward]] = {
    GatedSpec: GatedMLP,
    SquaredReluSpec: SquaredReluMLP,
    MixtureOfExpertsSpec: MixtureOfExperts,
    ParallelSpec: ParallelBlocks,
}
