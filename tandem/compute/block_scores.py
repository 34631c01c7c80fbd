"""Block scores of block-sparse attention, by which queries choose blocks, and attention to compressed keys, on any
device.

Here a chosen block is `BlockChoice.size` consecutive tokens of a request, numbered from 0. It need not be a block of
the KV cache. `BlockChoice` is the rule of the choice (top-k, and blocks that are always chosen). A summary is a row of
the KV cache made from the keys (or values) of a span of tokens, such as their mean. Sums are computed in float64
and rounded to float32, so that the order of summation changes them by less than a bit.
"""

from collections.abc import Iterator

import torch

from tandem.architecture.block_mixers import COMPRESSED_KEYS, COMPRESSED_VALUES, MEANS, BlockChoice
from tandem.compute.layer_states import LayerChosenKV
from tandem.compute.sparse import NOT_CHOSEN, QueryBatch
from tandem.compute.visible_sums import visible_sums

_WIDE = torch.float64
_HIGHEST = torch.finfo(torch.float32).max
_MOST_SCORES = 1 << 22  # scores of all heads that are computed at a time
_STEPS = 1 << 16  # sums of weights are rounded to 1 / _STEPS


def choose_by_index(queries: torch.Tensor, kv: LayerChosenKV, batch: QueryBatch, choice: BlockChoice) -> torch.Tensor:
    """Blocks chosen by each of the index `queries` [num_tokens, num_sets, index_dim]: a block's score is its highest
    product with the index key of one of its tokens. Returns [num_tokens, num_sets, most] int32, ascending, filled up
    with `NOT_CHOSEN`. `most`: `top_k`, or the number of blocks of the longest request if that is less.
    """
    assert kv.index_keys is not None
    chosen = _nothing(queries, batch, choice)
    for rows, blocks in _parts(queries, batch, kv.index_keys.shape[1]):
        positions = batch.positions[rows]
        keys = kv.index_keys[blocks].flatten(0, 1)[: int(positions[-1]) + 1].to(_WIDE)
        products = torch.einsum("qsd,kd->qsk", queries[rows].to(_WIDE), keys)
        is_later = torch.arange(len(keys), device=keys.device) > positions[:, None, None]
        scores = _by_block(products.masked_fill(is_later, -torch.inf), choice.size, -torch.inf).amax(dim=-1)
        _put(chosen[rows], scores, positions, choice)
    return chosen


def choose_by_means(queries: torch.Tensor, kv: LayerChosenKV, batch: QueryBatch, choice: BlockChoice) -> torch.Tensor:
    """Blocks chosen by each head of `queries` [num_tokens, num_heads, head_dim]: a block's score is the product with
    the mean of its keys. The query's own block, which has no mean yet, has the score 0. Returns [num_tokens, num_heads,
    most] int32, as `choose_by_index`.
    """
    summary, chosen = kv.summary(MEANS), _nothing(queries, batch, choice)
    for rows, blocks in _parts(queries, batch, kv.keys.shape[2]):
        positions = batch.positions[rows]
        last = int(positions[-1]) // choice.size
        spans = _rows(summary, blocks)[: last * choice.size // kv.span].to(_WIDE)
        means = spans.view(last, choice.size // kv.span, *spans.shape[1:]).mean(dim=1)  # [last, num_kv_heads, head_dim]
        scores = torch.einsum("qhgd,bhd->qhgb", _grouped(queries[rows], means), means).flatten(1, 2)
        _put(chosen[rows], torch.nn.functional.pad(scores, (0, 1)), positions, choice)
    return chosen


def attend_to_compressed(
    queries: torch.Tensor,
    kv: LayerChosenKV,
    batch: QueryBatch,
    choice: BlockChoice,
    *,
    scale: float,
    length: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output of `queries` [num_tokens, num_heads, head_dim], of that shape and dtype, over compressed keys and values
    of `length` tokens each, zero if there are none yet. Also the blocks that each KV head chooses by the weights of
    this attention, [num_tokens, num_kv_heads, most] int32, as `choose_by_index`.

    NOTE: a compressed key that lies in two blocks gives both the same weight, so their sums may differ only by
    rounding. Sums are rounded to 65,536ths, so that such blocks are equal.
    """
    keys, values = kv.summary(COMPRESSED_KEYS), kv.summary(COMPRESSED_VALUES)
    out = torch.zeros_like(queries)
    chosen = _nothing(queries[:, : keys.shape[1]], batch, choice)
    num_strides = length // kv.span  # in one of them
    for rows, blocks in _parts(queries, batch, kv.keys.shape[2]):
        positions = batch.positions[rows]
        end = max(num_strides - 1, (int(positions[-1]) + 1) // kv.span)
        own = [_rows(each, blocks)[num_strides - 1 : end].to(_WIDE) for each in (keys, values)]
        ends = (torch.arange(num_strides - 1, end, device=out.device) + 1) * kv.span
        is_later = (ends > (positions + 1)[:, None])[:, None, None]
        scores = torch.einsum("qhgd,khd->qhgk", _grouped(queries[rows], own[0]), own[0]) * scale
        weights = scores.masked_fill(is_later, -torch.inf).softmax(dim=-1).masked_fill(is_later, 0.0)
        out[rows] = _summed(weights, own[1], ~is_later).to(out.dtype)
        per_stride = _per_stride(weights.sum(dim=2), num_strides, int(positions[-1]) // kv.span + 1)
        sums = _by_block(per_stride, choice.size // kv.span, 0.0).sum(dim=-1)
        _put(chosen[rows], (sums * _STEPS).round_(), positions, choice)
    return out, chosen


def _summed(weights: torch.Tensor, values: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
    """Sums [num_tokens, num_heads, head_dim] of `values` [num_keys, num_kv_heads, head_dim] times `weights`
    [num_tokens, num_kv_heads, heads per KV head, num_keys], see `visible_sums`.
    """
    num_tokens, num_kv_heads, group, _ = weights.shape
    seen = visible[:, 0].expand(-1, group, -1).flatten(0, 1)
    sums = visible_sums(weights.transpose(0, 1).flatten(1, 2), values.transpose(0, 1), seen)
    return sums.view(num_kv_heads, num_tokens, group, -1).transpose(0, 1).flatten(1, 2)


def closed_spans(batch: QueryBatch, span: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Requests and positions, both int64 [n], of the step's tokens that are the last of a span of `span` tokens and
    have at least `length` tokens up to themselves, themselves included.
    """
    num_tokens = batch.positions + 1
    is_last = (num_tokens % span == 0) & (num_tokens >= length)
    return batch.requests[is_last], batch.positions[is_last]


def last_rows(
    cache: torch.Tensor, batch: QueryBatch, requests: torch.Tensor, positions: torch.Tensor, length: int
) -> torch.Tensor:
    """The last `length` rows of `cache` (K or V) up to each position, that one included: [num_positions, length,
    num_kv_heads, head_dim]. `requests` and `positions`: as `closed_spans` returns them.
    """
    block_size = cache.shape[2]
    tokens = positions[:, None] + torch.arange(1 - length, 1, device=positions.device)
    return cache[batch.block_tables[requests[:, None], tokens // block_size].long(), :, tokens % block_size]


def write_summary(
    kv: LayerChosenKV,
    name: str,
    rows: torch.Tensor,
    batch: QueryBatch,
    requests: torch.Tensor,
    positions: torch.Tensor,
) -> None:
    """Stores `rows` [num_positions, num_kv_heads, head_dim] as the summaries of the spans that end at `positions`.
    `name`: of the summary, such as `MEANS`.
    """
    block_size = kv.keys.shape[2]
    blocks = batch.block_tables[requests, positions // block_size].long()
    kv.summary(name)[blocks, :, positions % block_size // kv.span] = rows.to(kv.keys.dtype)


def _nothing(queries: torch.Tensor, batch: QueryBatch, choice: BlockChoice) -> torch.Tensor:
    most = min(choice.top_k, -(-batch.max_seq_len // choice.size))
    return torch.full((*queries.shape[:2], most), NOT_CHOSEN, dtype=torch.int32, device=queries.device)


def _parts(queries: torch.Tensor, batch: QueryBatch, block_size: int) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yields slices of the queries of one request, with the blocks of all tokens up to the last query of the slice."""
    bounds, seq_lens = batch.query_start.tolist(), batch.seq_lens.tolist()
    for request, seq_len in enumerate(seq_lens):
        at_once = max(1, _MOST_SCORES // (seq_len * queries.shape[1]))
        for start in range(bounds[request], bounds[request + 1], at_once):
            end = min(start + at_once, bounds[request + 1])
            num_tokens = seq_len - (bounds[request + 1] - end)
            yield slice(start, end), batch.block_tables[request, : -(-num_tokens // block_size)].long()


def _rows(summary: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Rows of `blocks`, [num_rows, num_kv_heads, head_dim], in order."""
    return summary[blocks].transpose(1, 2).flatten(0, 1)


def _grouped(queries: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """[num_tokens, num_kv_heads, heads per KV head, head_dim]"""
    num_queries, num_heads, width = queries.shape
    return queries.to(_WIDE).view(num_queries, rows.shape[1], num_heads // rows.shape[1], width)


def _by_block(scores: torch.Tensor, size: int, empty: float) -> torch.Tensor:
    """Divides the last dimension into parts of `size`; the last part is filled up with `empty`."""
    missing = -scores.shape[-1] % size
    padded = torch.nn.functional.pad(scores, (0, missing), value=empty)
    return padded.view(*scores.shape[:-1], padded.shape[-1] // size, size)


def _per_stride(weights: torch.Tensor, num_strides: int, count: int) -> torch.Tensor:
    """For each stride of tokens, the sum of the weights of all compressed keys that cover it, [..., count]. Key i
    covers strides i to i + num_strides - 1.
    """
    sums = weights.new_zeros((*weights.shape[:-1], max(count, weights.shape[-1] + num_strides - 1)))
    for shift in range(num_strides):
        sums[..., shift : shift + weights.shape[-1]] += weights
    return sums[..., :count]


def _put(chosen: torch.Tensor, scores: torch.Tensor, positions: torch.Tensor, choice: BlockChoice) -> None:
    """Writes into `chosen` the blocks with the best `scores` [num_tokens, num_sets, num_blocks], among those up to the
    query's own, and those that are always chosen. NaN counts as the lowest score.
    """
    num_blocks = scores.shape[2]
    blocks, own = torch.arange(num_blocks, device=scores.device), (positions // choice.size)[:, None, None]
    found = scores.float().nan_to_num_(nan=-_HIGHEST).clamp_(-_HIGHEST, _HIGHEST)
    found = found.masked_fill((blocks < choice.num_first) | (blocks > own - choice.num_last), torch.inf)
    found = found.masked_fill(blocks > own, -torch.inf)
    order = found.sort(dim=2, descending=True, stable=True).indices[..., : chosen.shape[2]]
    ascending = order.masked_fill(order > own, num_blocks).sort(dim=2).values
    chosen[..., : order.shape[2]] = ascending.masked_fill(ascending == num_blocks, NOT_CHOSEN).to(torch.int32)
