"""Several residual streams side by side, in place of one: manifold-constrained hyper-connections (mHC,
arXiv:2512.24880), as specs.

A token has `num_streams` streams of the hidden size, one after the other. All begin with its embedding.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tandem.architecture.tensors import LinearSpec, NormSpec, TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamWeights:
    """Numbers for each token, made of its streams: `linear` of all of them after `norm`, which multiplies by nothing,
    times `scales`, plus `biases`.

    Args:
        linear: from all streams to the numbers, in float32.
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
    """Connection of a block to `num_streams` residual streams, from which it reads and to which it writes.

    `weights` gives n numbers to read with, n to write with and n * n to mix with. The block's input is the sum of the
    streams, each times `sigmoid(read) + eps`. Stream k becomes `2 * sigmoid(write[k])` times the block's output, plus
    the sum over j of `mix[j, k]` times stream j.

    Mixing numbers are a softmax of each row, plus `eps`, whose columns and rows are divided by their sums plus `eps` in
    turn (Sinkhorn and Knopp): the columns once, then rows and columns `iterations - 1` times.
    """

    weights: StreamWeights
    num_streams: int
    iterations: int
    eps: float

    def tensors(self) -> Iterator[TensorSpec]:
        yield from self.weights.tensors()


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamsSpec:
    """The streams of a model. What the final norm gets is their sum, each times `sigmoid(weight) + eps`."""

    weights: StreamWeights
    num_streams: int
    eps: float

    def tensors(self) -> Iterator[TensorSpec]:
        yield from self.weights.tensors()
