"""The oracle of attention to chosen tokens, on any device."""

import torch

from tandem.compute.arena import LayerIndexedLatents
from tandem.compute.sparse import NOT_CHOSEN, ChosenRowsAsKV, IndexQueries, QueryBatch
from tandem.compute.torch.attention import ReferenceBackend

_WIDE = torch.float64  # NOTE: scores differ by less than a bit of float32 then, however many are computed at once
_LEAST = torch.finfo(torch.float32).min
_MOST_SCORES = 1 << 22  # of all heads, at a time


class ReferenceIndexedBackend(ChosenRowsAsKV):
    """Implements `IndexedLatentBackend` for every spec."""

    def __init__(self, device: torch.device | None = None) -> None:
        """`device` is where it will be used; any will do."""
        super().__init__(ReferenceBackend(device))

    def choose(self, index: IndexQueries, latents: LayerIndexedLatents, batch: QueryBatch, top_k: int) -> torch.Tensor:
        """See `IndexedLatentBackend.choose`."""
        assert latents.index_keys is not None
        num_heads, most = index.weights.shape[1], min(top_k, batch.max_seq_len)
        chosen = torch.full((len(batch.requests), most), NOT_CHOSEN, dtype=torch.int32, device=index.weights.device)
        bounds, seq_lens = batch.query_start.tolist(), batch.seq_lens.tolist()
        for request, seq_len in enumerate(seq_lens):
            blocks = batch.block_tables[request, : -(-seq_len // latents.index_keys.shape[1])].long()
            keys = latents.index_keys[blocks].flatten(0, 1)[:seq_len]
            at_once = max(1, _MOST_SCORES // (seq_len * num_heads))
            for start in range(bounds[request], bounds[request + 1], at_once):
                rows = slice(start, min(start + at_once, bounds[request + 1]))
                scores = _scores(index.queries[rows], keys, index.weights[rows], index.scale)
                best = _best(scores, batch.positions[rows], most)
                chosen[rows, : best.shape[1]] = best
        return chosen


def _scores(queries: torch.Tensor, keys: torch.Tensor, weights: torch.Tensor, scale: float) -> torch.Tensor:
    """[num_queries, num_keys] float32. A product that is no number counts as 0, a score that is none as the lowest."""
    products = torch.einsum("qhd,kd->qhk", queries.to(_WIDE), keys.to(_WIDE)) * scale
    products = products.where(products > 0, 0.0)
    scores = torch.einsum("qhk,qh->qk", products, weights.to(_WIDE)).float()
    return scores.nan_to_num_(nan=_LEAST).clamp_min_(_LEAST)


def _best(scores: torch.Tensor, positions: torch.Tensor, most: int) -> torch.Tensor:
    """Of each row the positions of its best, as `IndexedLatentBackend.choose` returns them."""
    num_keys = scores.shape[1]
    is_later = torch.arange(num_keys, device=scores.device) > positions[:, None]
    order = scores.masked_fill_(is_later, -torch.inf).sort(dim=1, descending=True, stable=True).indices[:, :most]
    ascending = order.masked_fill(is_later.gather(1, order), num_keys).sort(dim=1).values
    return ascending.masked_fill(ascending == num_keys, NOT_CHOSEN).to(torch.int32)
