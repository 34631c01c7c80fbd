"""A rank of a group that exchanges random numbers: `python -m tests.helpers.exchanging DESCRIPTOR RANK NUM_RANKS`.

Every rank knows what the others send, so each checks its own results; it fails where a bit differs.
"""

import sys
from collections.abc import Sequence

import torch

from tandem.compute.collectives import Collectives
from tandem.compute.native.exchange import SharedExchange

BUFFER_BYTES = 1 << 12  # small, so that some exchanges go in several parts
DEADLINE_S = 60.0


def tree_sum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Neighbours first; one without a neighbour is its own sum."""
    level = list(parts)
    while len(level) > 1:
        alone = level[len(level) // 2 * 2 :]
        level = [left + right for left, right in zip(level[::2], level[1::2], strict=False)] + alone
    return level[0]


def exchange_and_check(group: Collectives, rounds: int) -> None:
    """Random shapes and dtypes, the same at every rank."""
    random = torch.Generator().manual_seed(7)
    for number in range(rounds):
        m, n, kind = (int(torch.randint(low, high, (), generator=random)) for low, high in ((1, 9), (1, 300), (0, 3)))
        dtype = (torch.float32, torch.bfloat16, torch.float16)[kind]
        nodes = [torch.randn(m, n, generator=random) for _ in range(group.num_ranks)]
        bias = torch.randn(n, generator=random).to(dtype) if number % 2 else None
        expected = tree_sum(nodes) if bias is None else tree_sum(nodes) + bias.float()
        assert torch.equal(group.add(nodes[group.rank], bias, dtype), expected.to(dtype)), number
        bounds = [n * part // group.num_ranks for part in range(group.num_ranks)] + [n]
        whole = torch.randn(m, n, generator=random)
        own = whole[:, bounds[group.rank] : bounds[group.rank + 1]].contiguous()
        assert torch.equal(group.join(own, bounds), own if group.rank else whole), number
        parts = [torch.randn(m, n, generator=random).to(dtype) for _ in range(group.num_ranks)]
        assert torch.equal(group.gather(parts[group.rank]), torch.cat(parts, dim=1)), number
        k = 1 + number % 3
        owners = torch.randint(group.num_ranks, (m, k), generator=random)
        terms = torch.randn(m, k, n, generator=random)
        total = torch.zeros(m, n)
        for term in range(k):
            total += terms[:, term]
        assert torch.equal(group.collect(terms[owners == group.rank], owners, dtype), total.to(dtype)), number


if __name__ == "__main__":
    torch.set_num_threads(1)
    descriptor, rank, num_ranks = map(int, sys.argv[1:])
    exchange_and_check(
        SharedExchange(descriptor, rank, num_ranks, deadline_s=DEADLINE_S, buffer_bytes=BUFFER_BYTES), rounds=200
    )
