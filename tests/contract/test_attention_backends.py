"""Contract of every attention backend, against softmax attention written out in float64.

The arena is NaN wherever nobody's keys are and the table holds the null block where a window has passed, so that a read
of memory that is nobody's shows as NaN. Triton's kernels are interpreted on the CPU by their own unit tests; on a GPU,
`bench/gpu_checks.py` runs every backend.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tandem.architecture.state import KVSpec
from tandem.compute.attention import AttentionBackend, AttentionParams
from tandem.compute.backends import BACKENDS
from tandem.compute.layer_states import LayerKV
from tandem.compute.step import AttentionBatch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
RELATIVE = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}


@pytest.fixture(scope="module", params=BACKENDS[KVSpec]["cpu"], ids=lambda entry: entry.name)
def backend(request: pytest.FixtureRequest) -> AttentionBackend:
    created: AttentionBackend = request.param.create(torch.device("cpu"))
    return created


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Within two roundings of the dtype, relative to values of about one: probabilities may be rounded too."""
    assert not actual.isnan().any()
    bound = 2 * RELATIVE[actual.dtype] * (1 + expected.abs())
    assert ((actual.double() - expected).abs() <= bound).all()


@dataclass(frozen=True)
class Paged:
    """Requests in a paged cache that is NaN wherever nobody's keys are, and what attention over them must give."""

    queries: torch.Tensor
    kv: LayerKV
    batch: AttentionBatch
    expected: torch.Tensor


def paged(
    dtype: torch.dtype,
    requests: list[tuple[int, int]],  # (context length, query length)
    *,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 64,
    block_size: int = 16,
    window: int = 0,
    softcap: float = 0.0,
    sinks: bool = False,
) -> Paged:
    num_heads, num_kv_heads = heads
    needed = [-(-length // block_size) for length, _ in requests]
    arena = torch.full(
        (sum(needed) + 1, 3, 2, num_kv_heads, block_size, head_dim), math.nan, dtype=dtype
    )  # three layers share a page; ours is the middle one
    k_cache, v_cache = arena[:, 1, 0], arena[:, 1, 1]
    tables = torch.zeros(len(requests), max(needed) + 3, dtype=torch.int32)
    free = (torch.randperm(sum(needed), generator=torch.Generator().manual_seed(0)) + 1).tolist()
    q = normal(0, sum(length for _, length in requests), num_heads, head_dim, dtype=dtype)
    expected, start = [], 0
    for r, (seq_len, query_len) in enumerate(requests):
        k, v = (normal(10 * r + i, seq_len, num_kv_heads, head_dim, dtype=dtype) for i in (1, 2))
        oldest = max(0, seq_len - query_len - window + 1) if window else 0
        for block in range(oldest // block_size, needed[r]):
            tables[r, block] = free.pop()
            first = max(block * block_size, oldest)
            last = min((block + 1) * block_size, seq_len)
            slots = slice(first - block * block_size, last - block * block_size)
            k_cache[tables[r, block], :, slots] = k[first:last].transpose(0, 1)
            v_cache[tables[r, block], :, slots] = v[first:last].transpose(0, 1)
        expected.append(attention64(q[start : start + query_len], k, v, head_dim**-0.5, window, softcap, sinks))
        start += query_len
    lengths = torch.tensor(requests, dtype=torch.int32)
    query_start = F.pad(lengths[:, 1].cumsum(0, dtype=torch.int32), (1, 0))
    batch = AttentionBatch(
        query_start=query_start,
        seq_lens=lengths[:, 0].contiguous(),
        block_tables=tables[:, : max(needed)],
        slot_mapping=torch.empty(0, dtype=torch.int64),
        max_query_len=int(lengths[:, 1].max()),
        max_seq_len=int(lengths[:, 0].max()),
    )
    return Paged(q, LayerKV(k_cache, v_cache), batch, torch.cat(expected))


def attention64(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int, softcap: float, sinks: bool
) -> torch.Tensor:
    group = q.shape[1] // k.shape[1]
    k, v = (t.double().repeat_interleave(group, 1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    seq_len = k.shape[0]
    distance = torch.arange(seq_len - q.shape[0], seq_len)[:, None] - torch.arange(seq_len)[None]
    hidden = (distance < 0) | (distance >= (window or seq_len))
    scores = scores.masked_fill(hidden, -math.inf)
    if sinks:
        scores = torch.cat([scores, sinks_of(q.shape[1]).double()[:, None, None].expand(-1, len(q), 1)], dim=-1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :seq_len], v)


def sinks_of(num_heads: int) -> torch.Tensor:
    """From far below the scores to far above them."""
    return torch.linspace(-60.0, 20.0, num_heads)


ATTENTION_CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one token": ({"requests": [(1, 1)]}, {}),
    "decode": ({"requests": [(15, 1), (64, 1), (65, 1), (300, 1)]}, {}),
    "whole prompts": ({"requests": [(1, 1), (16, 16), (257, 257)]}, {}),
    "chunks and decodes mixed": ({"requests": [(5, 5), (130, 1), (300, 77), (64, 2)]}, {}),
    "no groups, block 8, odd head": (
        {"requests": [(100, 40), (9, 1)], "heads": (2, 2), "head_dim": 40, "block_size": 8},
        {},
    ),
    "smallest head": ({"requests": [(70, 3)], "head_dim": 8}, {}),
    "head of 24, block 128": ({"requests": [(200, 30)], "head_dim": 24, "block_size": 128, "heads": (8, 8)}, {}),
    "head of 128, wide group": ({"requests": [(150, 20), (150, 1)], "head_dim": 128, "heads": (16, 1)}, {}),
    "head of 256, block 32": ({"requests": [(130, 9)], "head_dim": 256, "block_size": 32}, {}),
    "head of 512": ({"requests": [(130, 9), (70, 1), (65, 65)], "head_dim": 512, "heads": (8, 1)}, {"window": 80}),
    "group larger than a task": ({"requests": [(66, 2)], "heads": (100, 1), "head_dim": 16}, {}),
    "window": ({"requests": [(300, 1), (300, 140), (20, 20)]}, {"window": 50}),
    "window of one": ({"requests": [(40, 5)]}, {"window": 1}),
    "window wider than context": ({"requests": [(90, 20)]}, {"window": 4096}),
    "softcap": ({"requests": [(130, 10), (64, 1)]}, {"softcap": 2.0}),
    "softcap and window": ({"requests": [(200, 70)]}, {"softcap": 30.0, "window": 65}),
    "sinks": ({"requests": [(130, 10), (64, 1), (1, 1)], "heads": (8, 2)}, {"sinks": True}),
    "sinks and window": ({"requests": [(300, 1), (200, 70)], "heads": (8, 2)}, {"sinks": True, "window": 65}),
    "long context": ({"requests": [(4500, 3)], "block_size": 64, "heads": (2, 1)}, {}),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", list(ATTENTION_CASES))
def test_attention_matches_float64(backend: AttentionBackend, dtype: str, case: str) -> None:
    shape, options = ATTENTION_CASES[case]
    step = paged(DTYPES[dtype], **shape, **options)
    assert_close(attend(backend, step, dtype, **options), step.expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 70])
@pytest.mark.parametrize("num_tokens", [2, 100])
def test_an_infinite_value_reaches_no_token_that_does_not_see_it(
    backend: AttentionBackend, dtype: str, window: int, num_tokens: int
) -> None:
    """Such as that of a draft token, which is then rejected, or of one that the window has left behind."""
    length = 260
    step = paged(DTYPES[dtype], [(length, num_tokens)], window=window)
    harmful = {length - 1: math.nan, length - 70: math.inf, length - num_tokens + 1: -math.inf}
    for position, value in harmful.items():
        step.kv.values[step.batch.block_tables[0, position // 16], :, position % 16, 3] = value
    out = attend(backend, step, dtype, window=window)
    for token in range(num_tokens):
        position = length - num_tokens + token
        seen = range(max(0, position - window + 1) if window else 0, position + 1)
        assert bool(out[token].isfinite().all()) == harmful.keys().isdisjoint(seen)
        others = [dim for dim in range(64) if dim != 3]
        assert_close(out[token, :, others], step.expected[token, :, others])
        if harmful.keys().isdisjoint(seen):
            assert_close(out[token], step.expected[token])


def test_queries_may_be_strided(backend: AttentionBackend) -> None:
    step = paged(torch.bfloat16, [(70, 5)])
    padded = torch.full((5, 4, 72), math.nan, dtype=torch.bfloat16)
    padded[..., :64] = step.queries
    assert_close(attend(backend, replace(step, queries=padded[..., :64]), "bfloat16"), step.expected)


def attend(
    backend: AttentionBackend, step: Paged, dtype: str, window: int = 0, softcap: float = 0.0, sinks: bool = False
) -> torch.Tensor:
    """Run the backend, or skip with the reason it gives for refusing such a layer."""
    _, num_kv_heads, block_size, head_dim = step.kv.keys.shape
    spec = KVSpec(num_kv_heads, head_dim, dtype, window=window or None)
    if (reason := backend.refuses(spec, block_size, softcap, sinks=sinks)) is not None:
        pytest.skip(f"{backend.name} refuses: {reason}")
    heads = sinks_of(step.queries.shape[1]) if sinks else None
    params = AttentionParams(step.queries.shape[1], head_dim**-0.5, window or None, softcap, heads)
    batch = backend.prepare(step.batch, step.kv, {params})
    return backend.attend(step.queries, step.kv, batch, params)
