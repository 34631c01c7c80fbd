"""Weights and experts of one rank's shard, whose products are completed by exchanges with the other ranks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tandem.architecture.feed_forward import Activation, Clamp
from tandem.compute.collectives import Collectives
from tandem.compute.ops import Experts, Numbers
from tandem.compute.weights.base import ExpertLinears, Linear, Weight


@dataclass(frozen=True, slots=True)
class _ShardWeight:
    """Base of a shard's weights (`Weight` of `base`), around the rank's `own` weight. No call that fuses several
    products uses them.
    """

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
    """Implements `Weight` for a rank with some of the inputs: products are added over the ranks."""

    def __call__(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, *, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        node = self.own(x, out_dtype=torch.float32)
        return self.collectives.add(node, bias, out_dtype or x.dtype)


@dataclass(frozen=True, slots=True)
class GatheredWeight(_ShardWeight):
    """Implements `Weight` for a rank with some of the outputs, if inputs are divided among ranks and all outputs are
    needed: inputs and outputs are gathered, so each output is one sum over all inputs.
    """

    def __call__(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, *, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        part = self.own(self.collectives.gather(x), bias, out_dtype=out_dtype)
        return self.collectives.gather(part)


@dataclass(frozen=True, slots=True)
class JoinedWeight(_ShardWeight):
    """Implements `Weight` for a rank with some of the outputs: rank 0 gets those of all ranks, the others their own.

    `bounds`: as in `Collectives.join`.
    """

    bounds: tuple[int, ...]

    def __call__(
        self, x: torch.Tensor, bias: torch.Tensor | None = None, *, out_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        return self.collectives.join(self.own(x, bias, out_dtype=torch.float32), self.bounds)


@dataclass(frozen=True, slots=True)
class SpreadRows:
    """Applies a function to whole rows of which each rank has a part, and returns the same part of the result.

    Args:
        function: [num_tokens, size] -> the same shape.
        within: this rank's part, as in a `NormSpec`. Neighbouring ranks may have the same part.
    """

    function: Callable[[torch.Tensor], torch.Tensor]
    size: int  # numbers of a whole row
    within: tuple[int, int]
    collectives: Collectives

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The result for `x` [num_tokens, own size], in new memory."""
        first, end = self.within
        num_ranks = self.collectives.num_ranks
        copies = num_ranks * (end - first) // self.size
        rows = self.collectives.gather(x).view(-1, num_ranks, end - first)[:, ::copies]
        return self.function(rows.reshape(-1, self.size).contiguous())[:, first:end].contiguous()


_PRODUCT_BYTES = 128 << 20  # most bytes of expert outputs in float32 at once; more tokens are computed in parts


class SpreadExperts:
    """Implements `Experts` for a rank with some of a layer's experts: every rank gets the sums over all experts.

    Args:
        own: this rank's experts, numbered from 0.
        bounds: rank i has experts `bounds[i]` to `bounds[i + 1] - 1`.
    """

    def __init__(self, own: Experts, collectives: Collectives, bounds: tuple[int, ...]) -> None:
        self._own = own
        self._collectives = collectives
        self._first = bounds[collectives.rank]
        self._inner_bounds = torch.tensor(bounds[1:-1])

    def __call__(
        self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, *, out_dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """See `Experts`. Each pair of token and expert is computed as a separate row, so its weighted output has the
        same bits as on a single rank.
        """
        chosen, order = chosen.sort(dim=1)  # one rank adds a token's outputs in this order too
        weights = weights.gather(1, order)
        size = max(1, _PRODUCT_BYTES // (chosen.shape[1] * x.shape[1] * torch.float32.itemsize))
        parts = [slice(first, first + size) for first in range(0, max(1, len(x)), size)]
        sums = [self._sum_part(x[part], weights[part], chosen[part], out_dtype) for part in parts]
        return sums[0] if len(sums) == 1 else torch.cat(sums)

    def _sum_part(
        self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, out_dtype: torch.dtype
    ) -> torch.Tensor:
        owners = torch.bucketize(chosen, self._inner_bounds, right=True)
        tokens, terms = (owners == self._collectives.rank).nonzero(as_tuple=True)
        products = self._own(
            x[tokens],
            weights[tokens, terms].unsqueeze(1),
            (chosen[tokens, terms] - self._first).unsqueeze(1),
            out_dtype=torch.float32,
        )
        return self._collectives.collect(products, owners, out_dtype)
