"""Random attention steps over an arena in which only what may be read is real, and a float64 oracle for them.

All else in the arena is NaN (the null block, freed window blocks, positions before a window, slots past the end), so a
backend that reads what it must not is found out by its output.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from tandem.architecture.state import KVSpec
from tandem.compute.arena import Arena
from tandem.compute.attention import AttentionParams
from tandem.compute.layer_states import TORCH_DTYPES, LayerKV
from tandem.compute.step import AttentionBatch
from tandem.kvcache.spec import build_layout


@dataclass(frozen=True)
class Shape:
    """One attention layer."""

    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    window: int | None = None
    softcap: float = 0.0
    dtype: str = "float32"

    @property
    def params(self) -> AttentionParams:
        return AttentionParams(self.num_heads, self.head_dim**-0.5, self.window, self.softcap)

    @property
    def spec(self) -> KVSpec:
        return KVSpec(self.num_kv_heads, self.head_dim, self.dtype, self.window)


@dataclass(frozen=True)
class RequestCase:
    """One request: `seq_len` tokens of which the last `query_len` are queried. float64, exact in the shape's dtype."""

    queries: torch.Tensor  # [query_len, num_heads, head_dim]
    keys: torch.Tensor  # [seq_len, num_kv_heads, head_dim]
    values: torch.Tensor  # [seq_len, num_kv_heads, head_dim]

    @property
    def first_position(self) -> int:
        return self.keys.shape[0] - self.queries.shape[0]

    def tail(self, num_tokens: int) -> "RequestCase":
        """The same request with only its last `num_tokens` queried."""
        return replace(self, queries=self.queries[-num_tokens:])


@dataclass(frozen=True)
class Step:
    """Input of a backend for one step."""

    queries: torch.Tensor  # [num_tokens, num_heads, head_dim]
    kv: LayerKV
    batch: AttentionBatch
    params: AttentionParams


def random_request(shape: Shape, seq_len: int, query_len: int, seed: int) -> RequestCase:
    generator = torch.Generator().manual_seed(seed)

    def draw(num_tokens: int, num_heads: int) -> torch.Tensor:
        numbers = torch.randn(num_tokens, num_heads, shape.head_dim, generator=generator)
        return numbers.to(TORCH_DTYPES[shape.dtype]).double()

    kv_heads = shape.num_kv_heads
    return RequestCase(draw(query_len, shape.num_heads) * 2, draw(seq_len, kv_heads), draw(seq_len, kv_heads))


def oracle(shape: Shape, request: RequestCase) -> torch.Tensor:
    """Softmax attention, written out, in float64: [query_len, num_heads, head_dim]."""
    group = shape.num_heads // shape.num_kv_heads
    keys, values = (tensor.repeat_interleave(group, dim=1) for tensor in (request.keys, request.values))
    scores = torch.einsum("qhd,khd->hqk", request.queries, keys) * shape.params.scale
    if shape.softcap:
        scores = shape.softcap * torch.tanh(scores / shape.softcap)
    query_positions = torch.arange(request.first_position, keys.shape[0])[:, None]
    distance = query_positions - torch.arange(keys.shape[0])[None, :]
    hidden = distance < 0 if shape.window is None else (distance < 0) | (distance >= shape.window)
    weights = scores.masked_fill(hidden, -math.inf).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, values)


def build_step(
    shape: Shape, requests: Sequence[RequestCase], *, seed: int = 0, device: str = "cpu", max_seq_len: int | None = None
) -> Step:
    """Lay the requests out in shuffled blocks of a poisoned arena; `kv` is the second of two layers in a page."""
    seq_lens = [request.keys.shape[0] for request in requests]
    needs = [math.ceil(seq_len / shape.block_size) for seq_len in seq_lens]
    layout = build_layout([shape.spec] * 2, shape.block_size)
    arena = Arena(layout, 1 + sum(needs), torch.device(device))
    arena.pages.view(TORCH_DTYPES[shape.dtype]).fill_(math.nan)
    free = (torch.randperm(sum(needs), generator=torch.Generator().manual_seed(seed)) + 1).tolist()
    tables = torch.zeros(len(requests), max(needs) + 3, dtype=torch.int32)
    kv = arena.layers[1]
    assert isinstance(kv, LayerKV)
    for row, request in enumerate(requests):
        first_visible = shape.spec.needed(request.first_position)
        for index in range(first_visible // shape.block_size, needs[row]):
            tables[row, index] = free.pop()
        _write(kv, tables[row], request, first_visible)
    query_lens = [request.queries.shape[0] for request in requests]
    batch = AttentionBatch(
        query_start=torch.tensor([0, *torch.tensor(query_lens).cumsum(0).tolist()], dtype=torch.int32, device=device),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        block_tables=tables.to(device)[:, : max(needs)],
        slot_mapping=torch.empty(0, dtype=torch.int64, device=device),
        max_query_len=max(query_lens),
        max_seq_len=max_seq_len or max(seq_lens),
    )
    queries = torch.cat([request.queries for request in requests]).to(TORCH_DTYPES[shape.dtype]).to(device)
    return Step(queries, kv, batch, shape.params)


def _write(kv: LayerKV, table: torch.Tensor, request: RequestCase, first: int) -> None:
    positions = torch.arange(first, request.keys.shape[0])
    blocks = table[positions // kv.keys.shape[2]].long()
    offsets = positions % kv.keys.shape[2]
    for pages, source in ((kv.keys, request.keys), (kv.values, request.values)):
        device = pages.device
        pages[blocks.to(device), :, offsets.to(device)] = source[first:].to(pages.dtype).to(device)


def batch_of(requests: Sequence[tuple[int, int]], tables: torch.Tensor) -> AttentionBatch:
    """A step of requests of so many tokens, the last so many of which are queried; nothing is written."""
    lengths = torch.tensor(requests, dtype=torch.int32)
    return AttentionBatch(
        query_start=torch.nn.functional.pad(lengths[:, 1].cumsum(0, dtype=torch.int32), (1, 0)),
        seq_lens=lengths[:, 0].contiguous(),
        block_tables=tables,
        slot_mapping=torch.empty(0, dtype=torch.int64),
        max_query_len=int(lengths[:, 1].max()),
        max_seq_len=int(lengths[:, 0].max()),
    )
