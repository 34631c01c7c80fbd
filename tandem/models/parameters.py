"""Parameters of a model in memory, by the names in its specs: weights of linear maps, and all other tensors."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from tandem.architecture.tensors import LinearSpec
from tandem.compute.collectives import Collectives
from tandem.compute.ops import Experts
from tandem.compute.weights.base import Linear, Weight
from tandem.compute.weights.shards import SpreadExperts, SpreadRows


@dataclass(frozen=True, slots=True)
class Parameters:
    """Parameters of a model, or of one rank's part of it.

    Args:
        tensors: embeddings, norms and biases.
        weights: weights of all linear maps, including the output head even if tied.
        collectives: exchange with the other ranks of the group; None = this is the whole model.
    """

    tensors: Mapping[str, torch.Tensor]
    weights: Mapping[str, Weight]
    collectives: Collectives | None = None

    @property
    def device(self) -> torch.device:
        """Device of all parameters."""
        return next(iter(self.tensors.values())).device  # NOTE: every model has norms

    def linear(self, spec: LinearSpec) -> Linear:
        """The linear map that `spec` describes."""
        return Linear(self.weights[f"{spec.name}.weight"], self.bias(spec), spec.scale)

    def bias(self, spec: LinearSpec) -> torch.Tensor | None:
        """Bias of the map, [out]; None = it has none."""
        return self.tensors[f"{spec.name}.bias"] if spec.bias else None

    def spread(self, own: Experts, bounds: tuple[int, ...] | None) -> Experts:
        """All experts of a layer, of which this rank has `own`, as one object that exchanges outputs with the other
        ranks. `bounds`: as in a `MixtureOfExpertsSpec`.
        """
        if bounds is None:
            return own
        assert self.collectives is not None, "shards are loaded for a group"
        return SpreadExperts(own, self.collectives, bounds)

    def over_ranks(
        self, function: Callable[[torch.Tensor], torch.Tensor], size: int, within: tuple[int, int]
    ) -> SpreadRows:
        """Function that applies `function` to whole rows of `size` elements, of which each rank has the elements
        `within`, and returns this rank's elements of the result.
        """
        assert self.collectives is not None, "shards are loaded for a group"
        return SpreadRows(function, size, within, self.collectives)
