"""A function of rows of which every rank has a part: the part of what one rank computes, to the bit."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tandem.compute.collectives import Collectives
from tandem.compute.native.exchange import SharedExchange, make_memory
from tandem.compute.weights.shards import SpreadRows
from tests.helpers.native_kernels import load_or_skip

WIDTH = 6


@pytest.mark.parametrize(("num_ranks", "num_parts"), [(2, 2), (4, 4), (4, 2), (2, 1)])
def test_every_rank_has_its_part(num_ranks: int, num_parts: int) -> None:
    """Neighbours have the same part where there are fewer parts than ranks."""
    load_or_skip()
    size = WIDTH * num_parts
    x = torch.randn(5, size, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    weight = torch.arange(size).to(torch.bfloat16)
    descriptor = make_memory(num_ranks)
    groups = [SharedExchange(descriptor, rank, num_ranks, deadline_s=30.0) for rank in range(num_ranks)]
    os.close(descriptor)

    def normed(rows: torch.Tensor) -> torch.Tensor:
        assert rows.is_contiguous()
        return rows * weight / rows.float().square().sum(dim=1, keepdim=True).to(rows.dtype)

    def compute(group: Collectives) -> torch.Tensor:
        first = group.rank * num_parts // num_ranks * WIDTH
        spread = SpreadRows(normed, size, (first, first + WIDTH), group)
        return spread(x[:, first : first + WIDTH])

    with ThreadPoolExecutor(num_ranks) as pool:
        found = list(pool.map(compute, groups))
    assert torch.equal(torch.cat(found[:: num_ranks // num_parts], dim=1), normed(x))
    assert all(part.is_contiguous() for part in found)
