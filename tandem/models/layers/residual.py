"""The residual stream: how a block's input is read from it, and how the block's output is put back.

Each block of a layer has a `Connection`, and both ends of the model an `Ends`. Neither knows what the block computes.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from tandem.compute.ops import Kernels
from tandem.models.layers.norm import Norm

Kept = tuple[torch.Tensor, ...]
"""What a connection keeps of each token while its block computes; each [num_tokens, ...]."""


class Connection(Protocol):
    """A block's connection to the stream, which is `stream` plus what is still to be added to it."""

    def take(
        self, norm: Norm | None, stream: torch.Tensor, x: torch.Tensor | None, /
    ) -> tuple[torch.Tensor, torch.Tensor, Kept]:
        """The block's input, normed, [num_tokens, hidden]; the stream, `x` added to it; and what `put` needs.

        NOTE: `stream` is updated in place.
        """
        ...

    def put(self, stream: torch.Tensor, y: torch.Tensor, kept: Kept, /) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The stream with the block's output `y`, and what of that is still to be added; None = nothing.

        NOTE: `stream` and `y` are overwritten.
        """
        ...


class Ends(Protocol):
    """The two ends of a model's residual stream."""

    def begin(self, hidden: torch.Tensor, /) -> torch.Tensor:
        """The stream before the first layer, of the embeddings [num_tokens, hidden]."""
        ...

    def end(self, norm: Norm, stream: torch.Tensor, x: torch.Tensor | None, /) -> torch.Tensor:
        """Output of the final norm, [num_tokens, hidden]. `x`: still to be added."""
        ...


@dataclass(frozen=True, slots=True)
class Addition:
    """Implements `Connection`: the input is the stream, and `scale` times the output is added to it.

    That is left to whoever reads the stream next, whose norm may do it in one pass.
    """

    scale: float

    def take(
        self, norm: Norm | None, stream: torch.Tensor, x: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, Kept]:
        return add_and_norm(norm, stream, x), stream, ()

    def put(self, stream: torch.Tensor, y: torch.Tensor, kept: Kept) -> tuple[torch.Tensor, torch.Tensor | None]:
        return stream, y if self.scale == 1.0 else y.mul_(self.scale)


class OneStream:
    """Implements `Ends`: the stream begins with the embeddings and is normed at the end."""

    def begin(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def end(self, norm: Norm, stream: torch.Tensor, x: torch.Tensor | None) -> torch.Tensor:
        return add_and_norm(norm, stream, x)


def add_and_norm(norm: Norm | None, stream: torch.Tensor, x: torch.Tensor | None) -> torch.Tensor:
    """`x` is added into `stream` in place, and the sum is normed."""
    if norm is None:
        return added(stream, x)
    return norm(stream) if x is None else norm(x, stream)


def added(stream: torch.Tensor, x: torch.Tensor | None) -> torch.Tensor:
    """`x` is added into `stream` in place."""
    return stream if x is None else stream.add_(x)


def take_tokens(kept: Kept, rows: torch.Tensor, kernels: Kernels) -> Kept:
    """Selects from `kept` the tokens `rows`, int64."""
    return tuple(kernels.take_rows(part.flatten(1), rows).view(-1, *part.shape[1:]) for part in kept)
