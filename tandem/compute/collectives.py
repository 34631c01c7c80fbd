"""The seam between the weights of a shard and the other ranks of its group: sums and joins of what each has computed.

All ranks make the same calls in the same order. The bits do not depend on the number of ranks.
"""

from collections.abc import Sequence
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
