"""Hyper-connections: blocks that read from several residual streams and write to all of them.

The bits of a token's result do not depend on the other tokens of a tensor. So streams are added one by one, since a
reduction may use another order for another shape.
"""

from collections.abc import Iterable
from functools import reduce

import torch

from tandem.architecture.residual import HyperConnectionSpec, StreamsSpec, StreamWeights
from tandem.compute.ops import Kernels
from tandem.models.layers.norm import Norm
from tandem.models.layers.residual import Kept
from tandem.models.layers.sigmoid import rowwise_sigmoid
from tandem.models.parameters import Parameters


class TokenWeights:
    """Computes `StreamWeights`. `counts`: number of values that each of the scales multiplies."""

    def __init__(self, spec: StreamWeights, counts: tuple[int, ...], parameters: Parameters, kernels: Kernels) -> None:
        self._norm = Norm.take(spec.norm, parameters, kernels)
        self._linear = parameters.linear(spec.linear)
        scales = parameters.tensors[spec.scales.name]
        self._scales = scales.repeat_interleave(torch.tensor(counts, device=scales.device))
        self._biases = parameters.tensors[spec.biases.name]

    def __call__(self, stream: torch.Tensor) -> torch.Tensor:
        """[num_tokens, streams * hidden] of any dtype -> [num_tokens, numbers], float32."""
        return self._linear(self._norm(stream.float())).mul_(self._scales).add_(self._biases)


class HyperConnection:
    """Implements `Connection`, of `residual`, with the tensors that a `HyperConnectionSpec` names."""

    def __init__(self, spec: HyperConnectionSpec, parameters: Parameters, kernels: Kernels) -> None:
        self._spec, self._kernels = spec, kernels
        counts = spec.num_streams, spec.num_streams, spec.num_streams**2
        self._weights = TokenWeights(spec.weights, counts, parameters, kernels)

    def read(
        self, norm: Norm | None, stream: torch.Tensor, x: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, Kept]:
        assert x is None, "whatever is written to streams is written at once"
        n, eps = self._spec.num_streams, self._spec.eps
        found = self._weights(stream)
        gates = rowwise_sigmoid(found[:, : 2 * n])
        y = weighted_sum(stream, gates[:, :n] + eps)
        mix = self._kernels.sinkhorn(found[:, 2 * n :].view(-1, n, n), self._spec.iterations, eps)
        return y if norm is None else norm(y), stream, (2 * gates[:, n:], mix)

    def write(self, stream: torch.Tensor, y: torch.Tensor, kept: Kept) -> tuple[torch.Tensor, torch.Tensor | None]:
        write, mix = kept
        total = write.unsqueeze(-1) * y.float().unsqueeze(1)  # [num_tokens, streams, hidden]
        for j, row in enumerate(_streams(stream, self._spec.num_streams).unbind(1)):
            total += mix[:, j].unsqueeze(-1) * row.unsqueeze(1)
        return stream.copy_(total.flatten(1)), None


class ManyStreams:
    """Implements `StreamEnds`, of `residual`, with the tensors that a `StreamsSpec` names, if this part of the model
    has them.
    """

    def __init__(self, spec: StreamsSpec, parameters: Parameters, kernels: Kernels, *, has_end: bool) -> None:
        self._spec = spec
        counts = (spec.num_streams,)
        self._weights = TokenWeights(spec.weights, counts, parameters, kernels) if has_end else None

    def begin(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.repeat(1, self._spec.num_streams)

    def end(self, norm: Norm, stream: torch.Tensor, x: torch.Tensor | None) -> torch.Tensor:
        assert x is None, "whatever is written to streams is written at once"
        assert self._weights is not None, "the model's end is in another stage"
        return norm(weighted_sum(stream, rowwise_sigmoid(self._weights(stream)) + self._spec.eps))


def weighted_sum(stream: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """[num_tokens, streams * hidden], weights [num_tokens, streams] float32 -> [num_tokens, hidden], rounded once."""
    streams = _streams(stream, weights.shape[1])
    total = _added(weights[:, i, None] * each for i, each in enumerate(streams.unbind(1)))
    return total.to(stream.dtype)


def _streams(stream: torch.Tensor, count: int) -> torch.Tensor:
    return stream.view(len(stream), count, stream.shape[1] // count)


def _added(parts: Iterable[torch.Tensor]) -> torch.Tensor:
    return reduce(torch.add, parts)
