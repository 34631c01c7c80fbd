"""Experts that are spread over ranks: the sums of one rank, to the bit, in parts of any size."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tandem.compute.collectives import Collectives
from tandem.compute.native.exchange import SharedExchange, make_memory
from tandem.compute.weights.shards import SpreadExperts
from tandem.core.expert_rows import ExpertRows
from tests.helpers.native_kernels import load_or_skip

NUM_EXPERTS, TOP_K, HIDDEN = 7, 3, 40
SCALES = torch.randn(NUM_EXPERTS, HIDDEN, generator=torch.Generator().manual_seed(1))


class ScalingExperts:
    """Implements `Experts` by experts that multiply by numbers of their own."""

    def __init__(self, scales: torch.Tensor) -> None:
        self._scales = scales

    def __call__(
        self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, *, out_dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        out = torch.zeros(x.shape, dtype=torch.float32)
        for expert, scales in enumerate(self._scales):
            tokens, terms = (chosen == expert).nonzero(as_tuple=True)
            out[tokens] += x[tokens].float() * scales * weights[tokens, terms].unsqueeze(1)
        return out.to(out_dtype)


def on_all_ranks(bounds: tuple[int, ...], call: Callable[[SpreadExperts], torch.Tensor]) -> list[torch.Tensor]:
    num_ranks = len(bounds) - 1
    descriptor = make_memory(num_ranks)
    groups = [SharedExchange(descriptor, rank, num_ranks, deadline_s=30.0) for rank in range(num_ranks)]
    os.close(descriptor)

    def compute(group: Collectives) -> torch.Tensor:
        own = ScalingExperts(SCALES[bounds[group.rank] : bounds[group.rank + 1]])
        return call(SpreadExperts(own, group, bounds))

    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(compute, groups))


@pytest.mark.parametrize("tokens_at_once", [1, 4, 100])
@pytest.mark.parametrize("bounds", [(0, 3, 7), (0, 1, 3, 5, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_rank_has_the_sums_of_one(
    bounds: tuple[int, ...], dtype: torch.dtype, tokens_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_or_skip()
    monkeypatch.setattr("tandem.compute.weights.shards._PRODUCT_BYTES", tokens_at_once * TOP_K * HIDDEN * 4)
    random = torch.Generator().manual_seed(2)
    x = torch.randn(9, HIDDEN, generator=random).to(dtype)
    weights = torch.rand(9, TOP_K, generator=random)
    chosen = torch.rand(9, NUM_EXPERTS, generator=random).argsort(1)[:, :TOP_K].contiguous()
    chosen[:4] = torch.tensor([2, 0, 1])  # none of these tokens has an expert of the last rank
    expected = ScalingExperts(SCALES)(x, weights, chosen, out_dtype=dtype)
    for found in on_all_ranks(bounds, lambda experts: experts(x, weights, chosen, out_dtype=dtype)):
        assert found.dtype == dtype
        assert torch.equal(found, expected)


def test_no_tokens_give_no_rows() -> None:
    load_or_skip()
    nothing = torch.zeros(0, HIDDEN), torch.zeros(0, TOP_K), torch.zeros(0, TOP_K, dtype=torch.int64)
    assert [found.shape for found in on_all_ranks((0, 3, 7), lambda experts: experts(*nothing))] == [(0, HIDDEN)] * 2


def test_rows_are_counted_by_rank_and_those_of_the_busiest() -> None:
    """Of two calls of three tokens: all at the experts of rank 0, then at both ranks'; and what a new group adds."""
    load_or_skip()
    descriptor = make_memory(2)
    groups = [SharedExchange(descriptor, rank, 2, deadline_s=30.0) for rank in range(2)]

    def count(group: SharedExchange) -> ExpertRows:
        experts = SpreadExperts(ScalingExperts(SCALES), group, (0, 3, 7))
        for chosen in ([0, 2], [2, 6]):
            experts(torch.ones(3, HIDDEN), torch.ones(3, 2), torch.tensor([chosen] * 3))
        return group.expert_rows

    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(count, groups)] == [ExpertRows((9, 3), 9)] * 2
    groups[0].open(descriptor)
    os.close(descriptor)
    assert groups[0].expert_rows == ExpertRows((9, 3), 9)
    assert groups[0].expert_rows.imbalance == 1.5
