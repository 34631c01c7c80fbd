"""Residual stream: how a block (mixer or feed-forward) reads its input from it, and how its output is added back.

Each block of a layer has a `Connection`, and begin and end of the model have a `StreamEnds`. Neither knows what a block
computes. The last addition may be pending: then the stream is the sum of a tensor `stream` and an output `x`.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from tandem.compute.ops import Kernels
from tandem.models.layers.norm import Norm

Kept = tuple[torch.Tensor, ...]
"""What a connection keeps of each token while its block computes; each [num_tokens, ...]."""


class Connection(Protocol):
    """Connection of a block to the residual stream."""

    def read(
        self, norm: Norm | None, stream: torch.Tensor, x: torch.Tensor | None, /
    ) -> tuple[torch.Tensor, torch.Tensor, Kept]:
        """Reads the block's input. Returns it, normed, [num_tokens, hidden]; the stream with the pending `x` added; and
        data for `write`.

        NOTE: `stream` is updated in place.
        """
        ...

    def write(self, stream: torch.Tensor, y: torch.Tensor, kept: Kept, /) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Adds the block's output `y`. Returns the stream, and the part of `y` that is still to be added; None =
        nothing.

        NOTE: `stream` and `y` are overwritten.
        """
        ...


class StreamEnds(Protocol):
    """Begin and end of a model's residual stream."""

    def begin(self, hidden: torch.Tensor, /) -> torch.Tensor:
        """The stream before the first layer, made from the embeddings [num_tokens, hidden]."""
        ...

    def end(self, norm: Norm, stream: torch.Tensor, x: torch.Tensor | None, /) -> torch.Tensor:
        """Output of the final norm, [num_tokens, hidden]. `x`: output that is still to be added; None = nothing."""
        ...


@dataclass(frozen=True, slots=True)
class Addition:
    """Implements `Connection`: the input is the stream, and `scale` times the output is added to it.

    The addition is left to the next reader of the stream, whose norm may do it in the same pass.
    """

    scale: float

    def read(
        self, norm: Norm | None, stream: torch.Tensor, x: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, Kept]:
        return add_and_norm(norm, stream, x), stream, ()

    def write(self, stream: torch.Tensor, y: torch.Tensor, kept: Kept) -> tuple[torch.Tensor, torch.Tensor | None]:
        return stream, y if self.scale == 1.0 else y.mul_(self.scale)


class OneStream:
    """Implements `StreamEnds`: the stream begins with the embeddings and is normed at the end."""

    def begin(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def end(self, norm: Norm, stream: torch.Tensor, x: torch.Tensor | None) -> torch.Tensor:
        return add_and_norm(norm, stream, x)


def add_and_norm(norm: Norm | None, stream: torch.Tensor, x: torch.Tensor | None) -> torch.Tensor:
    """Adds `x` into `stream` in place, and returns the norm of the sum."""
    if norm is None:
        return added(stream, x)
    return norm(stream) if x is None else norm(x, stream)


def added(stream: torch.Tensor, x: torch.Tensor | None) -> torch.Tensor:
    """Adds `x` into `stream` in place, and returns it."""
    return stream if x is None else stream.add_(x)


def take_tokens(kept: Kept, rows: torch.Tensor, kernels: Kernels) -> Kept:
    """The tokens `rows`, int64, of the data that `Connection.read` kept."""
    return tuple(kernels.take_rows(part.flatten(1), rows).view(-1, *part.shape[1:]) for part in kept)
