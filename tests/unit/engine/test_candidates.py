"""Top candidates are exact, ties included, by every route."""

import pytest
import torch

from tandem.engine.candidates import top_candidates


def _oracle(row: torch.Tensor, k: int) -> list[int]:
    return sorted(range(row.numel()), key=lambda token_id: (-row[token_id].item(), token_id))[:k]


@pytest.mark.parametrize("vocab_size", [1, 7, 127, 1000, 5003])
@pytest.mark.parametrize("k", [1, 3, 50, 400])
@pytest.mark.parametrize("num_distinct", [1, 3, 40, 10**6])
def test_matches_a_full_sort_alone_and_batched(vocab_size: int, k: int, num_distinct: int) -> None:
    generator = torch.Generator().manual_seed(vocab_size * k)
    logits = (torch.randint(0, num_distinct, (2, vocab_size), generator=generator) - num_distinct // 2).float()
    batched_values, batched_ids = top_candidates(logits, k)
    for row in range(2):
        values, token_ids = top_candidates(logits[row : row + 1], k)
        assert token_ids[0].tolist() == batched_ids[row].tolist() == _oracle(logits[row], k)
        assert torch.equal(values[0], logits[row][token_ids[0]])
        assert torch.equal(values[0], batched_values[row])


def test_infinities_and_signed_zeros_are_ordered() -> None:
    row = torch.tensor([[-0.0, float("-inf"), 0.0, -1e-40, 1e-40, float("inf"), -3.0, 2.0]])
    assert top_candidates(row, 8)[1][0].tolist() == [5, 7, 4, 0, 2, 3, 6, 1]


@pytest.mark.parametrize("num_allowed", [0, 1, 2, 4, 5, 6, 60])
@pytest.mark.parametrize("k", [5, 24])
def test_mostly_banned_rows_still_give_k_candidates(num_allowed: int, k: int) -> None:
    generator = torch.Generator().manual_seed(num_allowed)
    row = torch.full((1, 16384), float("-inf"))
    row[0, torch.randperm(16384, generator=generator)[:num_allowed]] = torch.randn(num_allowed, generator=generator)
    values, token_ids = top_candidates(row, k)
    assert token_ids[0].tolist() == _oracle(row[0], k)
    assert torch.equal(values[0], row[0][token_ids[0]])


def test_allowed_tokens_in_few_groups_are_all_looked_at() -> None:
    """More than k of them, behind fewer than k maxima."""
    row = torch.full((1, 16384), float("-inf"))
    row[0, ::256] = torch.arange(64.0)
    assert top_candidates(row, 5)[1][0].tolist() == _oracle(row[0], 5)


@pytest.mark.parametrize("num_nans", [1, 2000, 4096])
def test_nan_does_not_raise(num_nans: int) -> None:
    row = torch.zeros(1, 4096)
    row[0, :num_nans] = float("nan")
    assert top_candidates(row, 5)[1].shape == (1, 5)
