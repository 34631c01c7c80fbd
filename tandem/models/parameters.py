"""A model's parameters in memory, by the names of its specs: weights of linear maps, and tensors that are no such."""

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
    """`tensors`: embeddings, norms, biases. `weights`: of all linear maps, the head's too where it is the embedding.
    `collectives`: of the group of which this is one rank's part; None = it is the whole.
    """

    tensors: Mapping[str, torch.Tensor]
    weights: Mapping[str, Weight]
    collectives: Collectives | None = None

    @property
    def device(self) -> torch.device:
        """Device of all parameters."""
        return next(iter(self.tensors.values())).device  # NOTE: every model has norms

    def linear(self, spec: LinearSpec) -> Linear:
        """The map of that spec, which the model has."""
        return Linear(self.weights[f"{spec.name}.weight"], self.bias(spec), spec.scale)

    def bias(self, spec: LinearSpec) -> torch.Tensor | None:
        """[out]; None = the map has none."""
        return self.tensors[f"{spec.name}.bias"] if spec.bias else None

    def spread(self, own: Experts, bounds: tuple[int, ...] | None) -> Experts:
        """All experts of a layer, of which `own` are here. `bounds`: as in a `MixtureOfExpertsSpec`."""
        if bounds is None:
            return own
        assert self.collectives is not None, "shards are loaded for a group"
        return SpreadExperts(own, self.collectives, bounds)

    def over_ranks(
        self, function: Callable[[torch.Tensor], torch.Tensor], size: int, within: tuple[int, int]
    ) -> SpreadRows:
        """A function of rows of `size` elements, of which `within` are here; see `SpreadRows`."""
        assert self.collectives is not None, "shards are loaded for a group"
        return SpreadRows(function, size, within, self.collectives)
