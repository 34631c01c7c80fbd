"""Distances between two sets of logits, by hand."""

import math

import pytest
import torch

from bench.dtypes import distance


def logits(*rows: tuple[float, ...]) -> torch.Tensor:
    return torch.tensor(rows).log()


def test_distances_of_known_distributions() -> None:
    found = distance(logits((0.5, 0.5), (0.8, 0.2)), logits((0.25, 0.75), (0.4, 0.6)), [0, 1])
    assert found.logprob_errors.tolist() == pytest.approx([math.log(2), math.log(3)])
    expected = [0.5 * math.log(2) + 0.5 * math.log(2 / 3), 0.8 * math.log(2) + 0.2 * math.log(1 / 3)]
    assert found.divergences.tolist() == pytest.approx(expected)
    assert found.mean_divergence == pytest.approx(sum(expected) / 2)
    assert found.margins.tolist() == pytest.approx([0.0, math.log(4)], abs=1e-7)
    assert found.differs[1].item()


def test_logits_that_differ_by_a_constant_have_no_distance() -> None:
    """Over more rows than are taken at a time, so that none is lost between."""
    reference = torch.randn(600, 11, generator=torch.Generator().manual_seed(1))
    found = distance(reference, reference + 3, [row % 11 for row in range(600)])
    assert len(found.divergences) == len(found.differs) == 600
    assert not found.differs.any()
    assert found.logprob_errors.max().item() < 1e-5
    assert found.divergences.abs().max().item() < 1e-6
