"""Weights of a shard, whose products are completed by those of the other ranks."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tandem.architecture.feed_forward import Activation, Clamp
from tandem.compute.collectives import Collectives
from tandem.compute.ops import Experts, Numbers
from tandem.compute.weights.base import ExpertLinears, Linear, Weight


@dataclass(frozen=True, slots=True)
class _ShardWeight:
    """A `Weight` that is multiplied alone, in no call that fuses several."""

    own: Weight
    collectives: Collectives

    @property
    def shape(self) -> tuple[int, int]:
        return self.own.shape

    @property
    def dtype(self) -> torch.dtype | None:
        return self.own.dtype

    @property
    def num_bytes(self) -> int:
        return self.own.num_bytes

    @property
    def matrix(self) -> Numbers | None:
        return None

    def gated(
        self, x: torch.Tensor, bias: torch.Tensor | None, up: Linear, activation: Activation
    ) -> torch.Tensor | None:
        return None

    def grouped(self, experts: Sequence[ExpertLinears], activation: Activation, clamp: Clamp | None) -> Experts | None:
        return None


@dataclass(frozen=True, slots=True)
class SummedWeight(_ShardWeight):
    """Implements `Weight` for some of the inputs: products are added over the ranks."""

    def __call__(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, *, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        node = self.own(x, out_dtype=torch.float32)
        return self.collectives.add(node, bias, out_dtype or x.dtype)


@dataclass(frozen=True, slots=True)
class JoinedWeight(_ShardWeight):
    """Implements `Weight` for some of the outputs: rank 0 gets those of all ranks, the others their own.

    `bounds`: as in `Collectives.join`.
    """

    bounds: tuple[int, ...]

    def __call__(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, *, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        return self.collectives.join(self.own(x, bias, out_dtype=torch.float32), self.bounds)
