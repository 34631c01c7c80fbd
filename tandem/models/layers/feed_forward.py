"""Feed-forward blocks by the type of their spec, and several of them side by side."""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from tandem.architecture.feed_forward import FeedForwardSpec, GatedSpec, MixtureOfExpertsSpec, ParallelSpec
from tandem.compute.ops import Kernels
from tandem.models.layers.experts import MixtureOfExperts
from tandem.models.layers.linear import Norm
from tandem.models.layers.mlp import GatedMLP


class FeedForward(Protocol):
    """A feed-forward block. `graph_safe`: as `AttentionBackend.graph_safe`."""

    graph_safe: bool

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`x` [num_tokens, hidden] -> the same shape, in memory of its own."""
        ...


class ParallelBlocks:
    """Computes a `ParallelSpec` with the tensors that it names."""

    def __init__(self, spec: ParallelSpec, weights: Mapping[str, torch.Tensor], kernels: Kernels) -> None:
        self._branches = [
            (
                Norm.take_optional(branch.before, weights, kernels),
                build_feed_forward(branch.block, weights, kernels),
                Norm.take_optional(branch.after, weights, kernels),
            )
            for branch in spec.branches
        ]
        self.graph_safe = all(block.graph_safe for _, block, _ in self._branches)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`x` [num_tokens, hidden] -> the same shape; added in the order of the branches."""
        first, *others = (_between(before, block, after, x) for before, block, after in self._branches)
        for output in others:
            first.add_(output)
        return first


def _between(before: Norm | None, block: FeedForward, after: Norm | None, x: torch.Tensor) -> torch.Tensor:
    y = block(x if before is None else before(x))
    return y if after is None else after(y)


def build_feed_forward(spec: FeedForwardSpec, weights: Mapping[str, torch.Tensor], kernels: Kernels) -> FeedForward:
    """The block that computes `spec`."""
    return _BLOCKS[type(spec)](spec, weights, kernels)


_BLOCKS: dict[type, Callable[[Any, Mapping[str, torch.Tensor], Kernels], FeedForward]] = {
    GatedSpec: GatedMLP,
    MixtureOfExpertsSpec: MixtureOfExperts,
    ParallelSpec: ParallelBlocks,
}
