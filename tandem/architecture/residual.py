"""Specs of several parallel residual streams in place of one: manifold-constrained hyper-connections (mHC,
arXiv:2512.24880).

A token has `num_streams` streams of the hidden size, concatenated. All begin with its embedding.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tandem.architecture.tensors import LinearSpec, NormSpec, TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamWeights:
    """Numbers computed for each token from its streams: `linear(norm(streams)) * scales + biases`, where `norm` has no
    weight.

    Args:
        linear: map from all streams to the numbers, in float32.
        scales: one for each kind of number.
        biases: one for each number.
    """

    norm: NormSpec
    linear: LinearSpec
    scales: TensorSpec
    biases: TensorSpec

    def tensors(self) -> Iterator[TensorSpec]:
        yield from (replace(tensor, is_small=True) for tensor in self.linear.tensors())
        yield from (self.scales, self.biases)


@dataclass(frozen=True, slots=True, kw_only=True)
class HyperConnectionSpec:
    """Connection of a mixer or feed-forward block to `num_streams` residual streams, which it reads and writes.

    `weights` gives n numbers to read with, n to write with and n * n to mix with. The block's input is the sum of the
    streams, each times `sigmoid(read) + eps`. Stream k becomes `2 * sigmoid(write[k])` times the block's output, plus
    the sum over j of `mix[j, k]` times stream j.

    The mixing numbers are a softmax of each row plus `eps`, then alternately normalised to columns and rows of sum 1
    (Sinkhorn and Knopp), with `eps` added to each sum: once by columns, then `iterations - 1` times by rows and
    columns.
    """

    weights: StreamWeights
    num_streams: int
    iterations: int  # of the normalisation by columns
    eps: float

    def tensors(self) -> Iterator[TensorSpec]:
        yield from self.weights.tensors()


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamsSpec:
    """The residual streams of a model and their reduction at its end: the final norm gets the sum of the streams, each
    times `sigmoid(weight) + eps`.
    """

    weights: StreamWeights
    num_streams: int
    eps: float

    def tensors(self) -> Iterator[TensorSpec]:
        yield from self.weights.tensors()
