"""The seam between the weights of a shard and the other ranks of its group: sums and joins of what each has computed.

All ranks make the same calls in the same order. The bits do not depend on the number of ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


class Collectives(Protocol):
    """`num_ranks`: of the group, a power of two. `rank`: of this process, from 0; rank 0 leads."""

    @property
    def rank(self) -> int: ...

    @property
    def num_ranks(self) -> int: ...

    def add(self, node: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        """Sum over the ranks of `node` [num_tokens, size] float32, in a binary tree over neighbouring ranks, plus
        `bias` [size]; rounded once to `dtype`, which is that of `bias`. Every rank has it.

        Raises:
            EngineStoppedError: a rank is lost or late; nothing can be exchanged any more.
        """
        ...

    def join(self, part: torch.Tensor, bounds: Sequence[int]) -> torch.Tensor:
        """`part` [num_tokens, columns] float32 of every rank, side by side: [num_tokens, bounds[-1]] at rank 0. The
        others get their own part.

        Args:
            bounds: the columns of rank i are `bounds[i]` to `bounds[i + 1] - 1`.

        Raises:
            EngineStoppedError: as `add`.
        """
        ...

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """`part` [num_tokens, size] of every rank, all of one size and dtype, side by side in the order of ranks. Every
        rank has it: [num_tokens, num_ranks * size].

        Raises:
            EngineStoppedError: as `add`.
        """
        ...

    def collect(self, terms: torch.Tensor, owners: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Sum of each token's terms, in their order and from zero, in float32; rounded once to `dtype`. Every rank has
        it: [num_tokens, size].

        Args:
            terms: [own terms, size] float32, this rank's, in the order of tokens and of the terms of each.
            owners: int64 [num_tokens, terms of a token], the rank that has each; equal on all ranks.

        Raises:
            EngineStoppedError: as `add`.
        """
        ...


class StagePipe(Protocol):
    """One way from a rank of a stage to that of the next with the same part of each layer, or from one with earlier
    tokens of a prompt to that with the next ones. Rows arrive in order; a few are kept for a receiver that is busy.
    """

    def send(self, rows: torch.Tensor) -> None:
        """Sends `rows`; waits while the receiver has yet to take those before.

        Raises:
            EngineStoppedError: as `Collectives.add`.
        """
        ...

    def receive(self, rows: torch.Tensor) -> torch.Tensor:
        """Fills `rows`, which are shaped like those that are sent, and returns them.

        Raises:
            EngineStoppedError: as `Collectives.add`.
        """
        ...


@dataclass(frozen=True, slots=True)
class RankLinks:
    """Links of a rank to the others of its group, which computes a model in `num_stages` stages of layers, of which
    this rank has a part of `stage`, and prompts in `num_contexts` parts of consecutive tokens, of which it has
    `context`. The leader is in the last stage, and has the last tokens.

    group: of all ranks. shard: of those of its stage and context, among which layers are split.
    before, after: pipes from the stage before and to the next, of the same context; None = there is none.
    earlier, later: pipes within the stage from the context with the tokens before and to the one with those after; the
        first follows the last. None = there is one context.
    """

    group: Collectives
    shard: Collectives
    stage: int = 0
    num_stages: int = 1
    before: StagePipe | None = None
    after: StagePipe | None = None
    earlier: StagePipe | None = None
    later: StagePipe | None = None
    context: int = 0
    num_contexts: int = 1

    @property
    def has_last_tokens(self) -> bool:
        """Whether the tokens that are asked for, and all that are not divided, are computed in this context."""
        return self.context + 1 == self.num_contexts

    @property
    def is_last(self) -> bool:
        """Whether hidden states of the last layer, of the tokens that are asked for, are here."""
        return self.has_last_tokens and self.stage + 1 == self.num_stages


def names_of(links: RankLinks) -> tuple[str, str]:
    """The settings of a group, and of no group."""
    sizes = {"cp": links.num_contexts, "pp": links.num_stages, "tp": links.shard.num_ranks}
    named = {name: size for name, size in sizes.items() if size > 1} or {"tp": 1}
    return " with ".join(f"{name}={size}" for name, size in named.items()), " and ".join(f"{name}=1" for name in named)
