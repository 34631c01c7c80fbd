"""Quality of a quantised model against the original: perplexity, top-1 agreement and Kullback-Leibler divergence."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

_ROWS = 128  # tokens whose logits are in memory at a time

Logits = Callable[[torch.Tensor], torch.Tensor]
"""Residual stream after the last layer [rows, hidden] -> logits [rows, vocab], float32."""


@dataclass(frozen=True, slots=True)
class Quality:
    """Results over `num_tokens` predictions of the held-out text. `kl_divergence`: of the quantised model's
    distribution from the original's, in nats per token. `top1_agreement`: share of predictions with the same most
    probable token.
    """

    num_tokens: int
    perplexity_before: float
    perplexity_after: float
    top1_agreement: float
    kl_divergence: float


def compare(
    token_ids: torch.Tensor, before: torch.Tensor, after: torch.Tensor, logits_before: Logits, logits_after: Logits
) -> Quality:
    """Quality by the residual streams `before` and `after` quantisation, [sequences, length, hidden], of `token_ids`
    [sequences, length], and a function to logits for each.
    """
    sums = torch.zeros(4, dtype=torch.float64)
    num_tokens = 0
    for ids, original, quantised in zip(token_ids, before, after, strict=True):
        for start in range(0, len(ids) - 1, _ROWS):
            rows = slice(start, min(start + _ROWS, len(ids) - 1))
            wanted = ids[rows.start + 1 : rows.stop + 1]
            first = logits_before(original[rows]).log_softmax(-1)
            second = logits_after(quantised[rows]).log_softmax(-1)
            sums += torch.stack(
                (
                    functional.nll_loss(first, wanted, reduction="sum").double(),
                    functional.nll_loss(second, wanted, reduction="sum").double(),
                    (first.argmax(-1) == second.argmax(-1)).sum().double(),
                    functional.kl_div(second, first, reduction="sum", log_target=True).double(),
                )
            )
            num_tokens += len(wanted)
    nll_before, nll_after, same, divergence = (sums / num_tokens).tolist()
    return Quality(
        num_tokens,
        float(torch.tensor(nll_before, dtype=torch.float64).exp()),
        float(torch.tensor(nll_after, dtype=torch.float64).exp()),
        same,
        divergence,
    )


def relative_error(before: torch.Tensor, after: torch.Tensor) -> float:
    """Relative error: root of the sum of squares of the difference, over that of `before`."""
    return float((after - before).norm() / before.norm().clamp(min=1e-30))
