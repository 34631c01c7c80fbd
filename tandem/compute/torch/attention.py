"""Reference attention: the definition computed literally, one request at a time, on any device.

Slow and obviously right; every other backend is tested against it. It reads only the blocks that a window can see, so
poisoned or null entries elsewhere are never read.
"""

from collections.abc import Collection

import torch

from tandem.architecture.state import KVSpec
from tandem.compute.attention import AttentionParams
from tandem.compute.layer_states import LayerKV
from tandem.compute.step import AttentionBatch
from tandem.compute.visible_sums import visible_sums


class ReferenceBackend:
    """Implements `AttentionBackend`; float32 inside, float64 for float64 inputs."""

    name = "reference"
    graph_safe = False

    def __init__(self, device: torch.device | None = None) -> None:
        """`device` is where it will be used; any will do."""

    def refuses(self, spec: KVSpec, block_size: int, softcap: float, *, sinks: bool = False) -> str | None:
        """It serves every spec."""
        return None

    def prepare(self, batch: AttentionBatch, kv: LayerKV, layers: Collection[AttentionParams]) -> AttentionBatch:
        """The batch itself: nothing is derived from it."""
        return batch

    def attend(
        self, queries: torch.Tensor, kv: LayerKV, batch: AttentionBatch, params: AttentionParams
    ) -> torch.Tensor:
        """See `AttentionBackend.attend`. Rows of `queries` past the last request come back as zeros."""
        out = torch.zeros_like(queries)
        bounds, seq_lens = batch.query_start.tolist(), batch.seq_lens.tolist()
        for request, seq_len in enumerate(seq_lens):
            rows = slice(bounds[request], bounds[request + 1])
            if rows.start < rows.stop:
                out[rows] = _attend_one(queries[rows], kv, batch.block_tables[request], seq_len, params)
        return out


def _attend_one(
    queries: torch.Tensor, kv: LayerKV, block_table: torch.Tensor, seq_len: int, params: AttentionParams
) -> torch.Tensor:
    """[query_len, num_heads, head_dim] over the keys from the start of the first visible block."""
    block_size = kv.keys.shape[2]
    query_len, num_heads, _ = queries.shape
    first_query = seq_len - query_len
    oldest = 0 if params.window is None else max(0, first_query - params.window + 1)
    first_block, num_blocks = oldest // block_size, -(-seq_len // block_size)
    blocks = block_table[first_block:num_blocks].long()
    first = first_block * block_size
    compute = torch.float64 if queries.dtype == torch.float64 else torch.float32
    group = num_heads // kv.keys.shape[1]
    keys = _gather(kv.keys, blocks, seq_len - first, group, compute)
    values = _gather(kv.values, blocks, seq_len - first, group, compute)
    visible = _visible(first_query, query_len, first, seq_len, params.window, queries.device)
    weights = _weights(queries.to(compute), keys, visible, params)
    return visible_sums(weights, values, visible).transpose(0, 1).to(queries.dtype)


def _gather(cache: torch.Tensor, blocks: torch.Tensor, length: int, group: int, dtype: torch.dtype) -> torch.Tensor:
    """[num_heads, length, head_dim]: the blocks' rows in order, every KV head repeated for its group of heads."""
    pages = cache[blocks].transpose(0, 1)  # [num_kv_heads, num_blocks, block_size, head_dim]
    rows = pages.flatten(1, 2)[:, :length]
    return rows.to(dtype).repeat_interleave(group, dim=0)


def _visible(
    first_query: int, query_len: int, first_key: int, seq_len: int, window: int | None, device: torch.device
) -> torch.Tensor:
    """[query_len, num_keys]: key j is seen from position i when 0 <= i - j, and i - j < window."""
    positions = torch.arange(first_query, first_query + query_len, device=device)
    distance = positions[:, None] - torch.arange(first_key, seq_len, device=device)[None, :]
    causal = distance >= 0
    return causal if window is None else causal & (distance < window)


def _weights(queries: torch.Tensor, keys: torch.Tensor, visible: torch.Tensor, params: AttentionParams) -> torch.Tensor:
    """Softmax over the visible keys: [num_heads, query_len, num_keys]."""
    scores = torch.einsum("qhd,hkd->hqk", queries, keys) * params.scale
    if params.softcap:
        scores = torch.tanh(scores / params.softcap) * params.softcap
    scores = scores.masked_fill(~visible, float("-inf"))
    if params.sinks is None:
        return scores.softmax(dim=-1)
    sinks = params.sinks.to(scores.dtype)[:, None, None].expand(-1, scores.shape[1], 1)
    return torch.cat([scores, sinks], dim=-1).softmax(dim=-1)[..., :-1]
