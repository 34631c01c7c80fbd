"""Messages of the two processes of a hand-off over a pipe. Times are of the machine's monotonic clock."""

from dataclasses import dataclass

import torch

BLOCKS_AT_ONCE = 64  # summed together: their words as int64 and the products take four times the bytes of the blocks


@dataclass(frozen=True, slots=True)
class Hello:
    """The source's pages, for processes that can map them, and cards by transport; `refused`: why others have none."""

    pages: torch.Tensor
    cards: dict[str, bytes]
    refused: dict[str, str]


@dataclass(frozen=True, slots=True)
class Prefill:
    """Compute this prompt under a lease, `num_new_tokens` after it. The lease ends with the next message."""

    prompt: list[int]
    num_new_tokens: int = 1


@dataclass(frozen=True, slots=True)
class Computed:
    """These blocks, from entry `first_index` of the block table on, may be read."""

    first_index: int
    block_ids: tuple[int, ...]
    sent_s: float


@dataclass(frozen=True, slots=True)
class Answered:
    """The prompt's first tokens."""

    token_ids: list[int]
    sent_s: float


@dataclass(frozen=True, slots=True)
class Sums:
    """Asks for, or holds, one number a block that tells whether its bytes are the same."""

    block_ids: tuple[int, ...]
    values: tuple[int, ...] = ()


def block_sums(pages: torch.Tensor, block_ids: tuple[int, ...]) -> tuple[int, ...]:
    """Sums of the blocks' words, each weighted by its place."""
    sums: list[int] = []
    for start in range(0, len(block_ids), BLOCKS_AT_ONCE):
        chosen = torch.tensor(block_ids[start : start + BLOCKS_AT_ONCE], device=pages.device)
        words = pages[chosen].view(torch.int32).long()
        weights = torch.arange(1, words.shape[1] + 1, device=pages.device)
        sums += (words * weights).sum(1).tolist()
    return tuple(sums)
