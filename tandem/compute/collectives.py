"""Interface of exchanges between the ranks of a worker: sums and concatenations of the parts that each rank has
computed, and pipes between pipeline stages or contexts (parts of a prompt's tokens).

All ranks make the same calls in the same order; a call waits for the others. The bits of a result do not depend on the
number of ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch


class Collectives(Protocol):
    """Exchanges among the ranks of a group. `num_ranks`: size of the group, a power of two if they divide matrices.
    `rank`: this process's, from 0; rank 0 leads.
    """

    @property
    def rank(self) -> int: ...

    @property
    def num_ranks(self) -> int: ...

    def add(self, node: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        """Sum over the ranks of `node` [num_tokens, size] float32, in a binary tree over neighbouring ranks, plus
        `bias` [size]; rounded once to `dtype`, the dtype of `bias`. A rank without a neighbour at a level of the tree
        goes on to the next. Every rank gets the sum.

        Raises:
            EngineStoppedError: a rank is lost or late; nothing can be exchanged any more.
        """
        ...

    def join(self, part: torch.Tensor, bounds: Sequence[int]) -> torch.Tensor:
        """Concatenates the `part` [num_tokens, columns] float32 of all ranks: [num_tokens, bounds[-1]] at rank 0. The
        others get their own part.

        Args:
            bounds: the columns of rank i are `bounds[i]` to `bounds[i + 1] - 1`.

        Raises:
            EngineStoppedError: as `add`.
        """
        ...

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """Concatenates the `part` [num_tokens, size] of all ranks, of equal size and dtype, in the order of ranks.
        Every rank gets the result, [num_tokens, num_ranks * size].

        Raises:
            EngineStoppedError: as `add`.
        """
        ...

    def collect(self, terms: torch.Tensor, owners: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Sum of each token's terms, in their order, starting at zero, in float32; rounded once to `dtype`. Every rank
        gets it: [num_tokens, size].

        Args:
            terms: [own terms, size] float32, this rank's, ordered by token and by index of the term.
            owners: int64 [num_tokens, terms of a token], the rank that has each term; equal on all ranks.

        Raises:
            EngineStoppedError: as `add`.
        """
        ...


class StagePipe(Protocol):
    """One-way pipe from a rank of a pipeline stage to the rank of the next stage with the same part of each layer, or
    from a rank with earlier tokens of a prompt to the one with the next tokens. Rows arrive in order; a few are
    buffered for a busy receiver.
    """

    def send(self, rows: torch.Tensor) -> None:
        """Sends `rows`; waits while the buffer is full.

        Raises:
            EngineStoppedError: as `Collectives.add`.
        """
        ...

    def receive(self, rows: torch.Tensor) -> torch.Tensor:
        """Fills `rows`, which must have the shape of the sent rows, and returns them.

        Raises:
            EngineStoppedError: as `Collectives.add`.
        """
        ...


@dataclass(frozen=True, slots=True)
class RankLinks:
    """Exchanges and pipes of a rank. Its group computes a model in `num_stages` pipeline stages, and
    prompts in `num_contexts` parts of consecutive tokens (context parallelism). This rank has a part of stage `stage`,
    for the tokens of part `context`. The leader is in the last stage, and has the last tokens.

    Args:
        group: exchange among all ranks.
        shard: exchange among the ranks of this stage and context, which divide the layers' matrices.
        before, after: pipes from the previous stage and to the next, of the same context; None = there is none.
        earlier, later: pipes within the stage from the context with the previous tokens and to the one with the next
            ones; the first follows the last. None = there is only one context.
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
        """Whether this context computes the tokens whose logits are needed, and all tokens that are not divided."""
        return self.context + 1 == self.num_contexts

    @property
    def is_last(self) -> bool:
        """Whether this rank has the last layer's hidden states of the tokens whose logits are needed."""
        return self.has_last_tokens and self.stage + 1 == self.num_stages


def names_of(links: RankLinks) -> tuple[str, str]:
    """The settings of the group in words, such as "pp=2 with tp=2", and those without a group, "pp=1 and tp=1"."""
    sizes = {"cp": links.num_contexts, "pp": links.num_stages, "tp": links.shard.num_ranks}
    named = {name: size for name, size in sizes.items() if size > 1} or {"tp": 1}
    return " with ".join(f"{name}={size}" for name, size in named.items()), " and ".join(f"{name}=1" for name in named)
