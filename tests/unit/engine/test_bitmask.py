"""A mask's bits mean the same wherever they are laid over a row."""

import math

import numpy as np
import pytest
import torch

from tandem.engine.bitmask import ban_by_bits, ban_by_flags, banned_on_device

NUM_WORDS = 7


def _words(num_rows: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31, (num_rows, NUM_WORDS), generator=torch.Generator().manual_seed(0)).int()


def _is_allowed(words: torch.Tensor, token_id: int) -> bool:
    return bool((int(words[token_id // 32]) >> (token_id % 32)) & 1)


@pytest.mark.parametrize("vocab_size", [1, 8, 200, 224])
def test_both_ways_ban_what_the_bits_leave_out(vocab_size: int) -> None:
    words = _words(5)
    banned = banned_on_device(words, vocab_size)
    assert banned.shape == (5, vocab_size)
    logits = torch.arange(vocab_size, dtype=torch.float32) - 3
    for row in range(5):
        expected = [logits[i].item() if _is_allowed(words[row], i) else -math.inf for i in range(vocab_size)]
        by_bits, by_flags = logits.clone(), logits.clone()
        ban_by_bits(words[row].numpy().view(np.uint8), by_bits)
        ban_by_flags(banned[row], by_flags)
        assert by_bits.tolist() == by_flags.tolist() == expected


def test_infinite_logits_are_banned_and_nan_is_not_hidden() -> None:
    """A model that computes NaN is at fault, wherever it stands."""
    row = torch.tensor([math.inf, math.inf, math.nan, math.nan])
    ban_by_bits(np.array([0b0101], dtype=np.uint8), row)
    assert row[:2].tolist() == [math.inf, -math.inf]
    assert row[2:].isnan().all()
