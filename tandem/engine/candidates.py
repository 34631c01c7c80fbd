"""Top-k of logits in the engine's documented order: descending logit, then ascending token id.

Invariant: the result is exact, ties included, on every device and for every method of finding it. Requests and
randomness are unknown here.
"""

import torch

_GROUP_SIZES = (128, 16)  # elements behind one maximum; the first that leaves enough groups is taken


def top_candidates(logits: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first `k` tokens of each row in the documented order: their logits and token ids, [num_rows, k] each.

    `logits`: float32 [num_rows, vocab_size], not modified. Returns (values float32, token_ids int64), both
    [num_rows, min(k, vocab_size)]. NaNs do not raise; their place in the order is not defined.
    """
    k = min(k, logits.shape[-1])
    if logits.device.type == "cpu" and logits.shape[0] == 1:
        narrowed = _narrow(logits[0], k)
        if narrowed is not None:
            values, token_ids = narrowed
            return _first(values.unsqueeze(0), token_ids.unsqueeze(0), k)
    token_ids = torch.arange(logits.shape[-1], device=logits.device).expand_as(logits)
    return _first(logits, token_ids, k)


def _first(values: torch.Tensor, token_ids: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """First k by one integer key a candidate: the order-preserving bits of the float, then the inverted token id."""
    bits = (values + 0.0).view(torch.int32)  # adding zero merges -0.0 into 0.0
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    keys = (ordered.to(torch.int64) << 32) + (0xFFFFFFFF - token_ids)
    positions = keys.topk(k, dim=-1, sorted=True).indices
    return values.gather(-1, positions), token_ids.gather(-1, positions)


def _narrow(row: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Candidates that surely include the top k of `row` [vocab_size], or None where looking for them does not pay.

    The k-th largest of disjoint groups' maxima is a lower bound of the k-th largest logit: at least k groups reach it.
    Group g holds the elements g, g + num_groups, ..., so the maxima are a vectorised pass over rows of a matrix.
    """
    vocab_size = row.shape[0]
    size = next((size for size in _GROUP_SIZES if vocab_size // size >= 4 * k), None)
    if size is None:
        return None
    num_groups = vocab_size // size
    matrix = row[: num_groups * size].view(size, num_groups)
    maxima = matrix.amax(0)  # [num_groups]
    threshold = maxima.topk(k, sorted=False).values.amin()
    if threshold.isnan():
        return None
    if threshold.isneginf():
        return _allowed(row, k)
    groups = (maxima >= threshold).nonzero().squeeze(-1)
    members = (torch.arange(size) * num_groups).unsqueeze(-1) + groups
    rest = torch.arange(num_groups * size, vocab_size)
    token_ids = torch.cat([members.flatten(), rest])
    values = row[token_ids]
    reaching = (values >= threshold).nonzero().squeeze(-1)
    return values[reaching], token_ids[reaching]


def _allowed(row: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The candidates of a row that is banned but for few: those, and as many of the first tokens as fill k places."""
    token_ids = (row > float("-inf")).nonzero().squeeze(-1)
    if token_ids.shape[0] < k:
        token_ids = torch.cat([token_ids, row[:k].isneginf().nonzero().squeeze(-1)])
    return row[token_ids], token_ids
