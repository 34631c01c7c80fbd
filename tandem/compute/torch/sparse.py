"""Reference implementation of sparse latent attention, on any device.

Adds the choice of tokens (top-k selection by index keys), computed literally in float64. Attention to them is
`ChosenRowsAsKV`'s, with the reference backend.
"""

from collections.abc import Iterator

import torch

from tandem.compute.layer_states import LayerIndexedLatents
from tandem.compute.sparse import NOT_CHOSEN, ChosenRowsAsKV, IndexQueries, QueryBatch
from tandem.compute.torch.attention import ReferenceBackend

WIDE = torch.float64  # NOTE: scores differ by less than a bit of float32 then, however many are computed at once
_LEAST = torch.finfo(torch.float32).min
_MOST_SCORES = 1 << 22  # of all heads, at a time


class ReferenceIndexedBackend(ChosenRowsAsKV):
    """Implements `IndexedLatentBackend` for every spec."""

    def __init__(self, device: torch.device | None = None) -> None:
        """`device` is where it will be used; any will do."""
        super().__init__(ReferenceBackend(device))

    def choose(self, index: IndexQueries, latents: LayerIndexedLatents, batch: QueryBatch, top_k: int) -> torch.Tensor:
        """Positions of the best tokens, see `IndexedLatentBackend.choose`. A product that is NaN counts as 0, a score
        that is NaN as the lowest.
        """
        assert latents.index_keys is not None
        most = min(top_k, batch.max_seq_len)
        chosen = torch.full((len(index.weights), most), NOT_CHOSEN, dtype=torch.int32, device=index.weights.device)
        for rows, products in _products(index.queries, latents.index_keys, batch):
            positive = (products * index.scale).where(products > 0, 0.0)
            scores = torch.einsum("qhk,qh->qk", positive, index.weights[rows].to(WIDE))
            best = best_places(narrow(scores), batch.positions[rows] + 1, most)
            chosen[rows, : best.shape[1]] = best
        return chosen


def _products(
    queries: torch.Tensor, index_keys: torch.Tensor, batch: QueryBatch
) -> Iterator[tuple[slice, torch.Tensor]]:
    """Slices of queries, with their products with all keys of their request, [num_rows, num_heads, num_keys]."""
    bounds, seq_lens = batch.query_start.tolist(), batch.seq_lens.tolist()
    for request, seq_len in enumerate(seq_lens):
        blocks = batch.block_tables[request, : -(-seq_len // index_keys.shape[1])].long()
        keys = index_keys[blocks].flatten(0, 1)[:seq_len].to(WIDE)
        at_once = max(1, _MOST_SCORES // (seq_len * queries.shape[1]))
        for start in range(bounds[request], bounds[request + 1], at_once):
            rows = slice(start, min(start + at_once, bounds[request + 1]))
            yield rows, torch.einsum("qhd,kd->qhk", queries[rows].to(WIDE), keys)


def narrow(scores: torch.Tensor) -> torch.Tensor:
    """Scores in float32; NaN becomes the lowest finite number, which is above -inf."""
    return scores.float().nan_to_num_(nan=_LEAST, posinf=torch.inf).clamp_min_(_LEAST)


def best_places(scores: torch.Tensor, counts: torch.Tensor, most: int) -> torch.Tensor:
    """For each row the indices of its best among the first `counts` scores, ascending; then `NOT_CHOSEN`."""
    end = scores.shape[1]
    is_later = torch.arange(end, device=scores.device) >= counts[:, None]
    order = scores.masked_fill(is_later, -torch.inf).sort(dim=1, descending=True, stable=True).indices[:, :most]
    ascending = order.masked_fill(is_later.gather(1, order), end).sort(dim=1).values
    return ascending.masked_fill(ascending == end, NOT_CHOSEN).to(torch.int32)
