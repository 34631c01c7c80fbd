"""What every implementation of the kernels must do, against float64 arithmetic written out here.

Outputs are poisoned with NaN before the call and caches wherever nothing was written, so that a missed element or a
read of memory that is nobody's shows as NaN.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tandem.core.errors import ConfigurationError
from tandem.native.fallback import TorchKernels
from tandem.native.library import NativeKernels, load

Implementation = NativeKernels | TorchKernels
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
RELATIVE = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


@pytest.fixture(scope="module", params=["native", "torch"])
def kernels(request: pytest.FixtureRequest) -> Implementation:
    if request.param == "torch":
        return TorchKernels()
    try:
        return load()
    except ConfigurationError as error:
        pytest.skip(str(error))


def normal(seed: int, *shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def strided(x: torch.Tensor, extra: int = 8) -> torch.Tensor:
    """The same values in rows that are `extra` elements further apart, with NaN between them."""
    padded = torch.full((*x.shape[:-1], x.shape[-1] + extra), math.nan, dtype=x.dtype)
    padded[..., : x.shape[-1]] = x
    return padded[..., : x.shape[-1]]


def assert_close(actual: torch.Tensor, expected: torch.Tensor, magnitude: float, *, slack: float = 1.0) -> None:
    """Within one rounding of the dtype, plus float32 rounding of intermediate values of size `magnitude`."""
    assert not actual.isnan().any()
    bound = RELATIVE[actual.dtype] * slack * expected.abs() + 2e-6 * magnitude
    if actual.dtype == torch.float16:
        bound = bound + 2**-24
    assert ((actual.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(1, 1, 8), (1, 64, 1000), (2, 7, 24), (3, 33, 40), (6, 130, 96), (17, 30, 1000), (70, 65, 31), (200, 5, 257)],
)
def test_linear_matches_float64(kernels: Implementation, dtype: torch.dtype, m: int, n: int, k: int) -> None:
    x, weight, bias = normal(m, m, k, dtype=dtype), normal(n, n, k, dtype=dtype), normal(k, n, dtype=dtype)
    expected = x.double() @ weight.double().T
    magnitude = 4 * math.sqrt(k)
    assert_close(kernels.linear(x, weight), expected, magnitude)
    assert_close(kernels.linear(strided(x), weight, bias), expected + bias.double(), magnitude)


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_can_return_float32(kernels: Implementation, dtype: torch.dtype) -> None:
    x, weight = normal(0, 5, 100, dtype=dtype), normal(1, 19, 100, dtype=dtype)
    logits = kernels.linear(x, weight, out_dtype=torch.float32)
    assert logits.dtype == torch.float32
    assert_close(logits, x.double() @ weight.double().T, 40.0)


@pytest.mark.parametrize("m", [1, 2, 5, 40])
def test_linear_writes_every_element_of_out_and_nothing_else(kernels: Implementation, m: int) -> None:
    x, weight = normal(0, m, 48, dtype=torch.bfloat16), normal(1, 11, 48, dtype=torch.bfloat16)
    around = torch.full((m, 20), math.nan, dtype=torch.bfloat16)
    assert kernels.linear(x, weight, out=around[:, 3:14]) is not None
    assert not around[:, 3:14].isnan().any()
    assert around[:, :3].isnan().all()
    assert around[:, 14:].isnan().all()


def test_linear_of_no_rows_is_empty(kernels: Implementation) -> None:
    assert kernels.linear(torch.empty(0, 16), torch.ones(4, 16)).shape == (0, 4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", list(ACTIVATIONS))
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 24), (1, 50, 1000), (7, 33, 40), (64, 31, 96)])
def test_gated_linear_matches_float64(
    kernels: Implementation, dtype: torch.dtype, activation: str, m: int, n: int, k: int
) -> None:
    x = normal(0, m, k, dtype=dtype)
    gate, up = normal(1, n, k, dtype=dtype), normal(2, n, k, dtype=dtype)
    gated, raised = x.double() @ gate.double().T, x.double() @ up.double().T
    result = kernels.gated_linear(strided(x), gate, up, activation)
    assert_close(result, ACTIVATIONS[activation](gated) * raised, 16.0 * k)


def test_gated_linear_saturates_instead_of_overflowing(kernels: Implementation) -> None:
    x = torch.tensor([[1000.0, 0.0], [-1000.0, 0.0]])
    weight = torch.eye(2)
    result = kernels.gated_linear(x, weight, torch.ones(2, 2), "silu")
    assert result.flatten().tolist() == pytest.approx([1e6, 0.0, 0.0, 0.0], abs=1e-30)


# q, k_cache, v_cache, block_tables, query_start, seq_lens
Arguments = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Paged:
    """Requests in a paged cache that is NaN wherever nobody's keys are, and what attention over them must give."""

    arguments: Arguments
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
        expected.append(attention64(q[start : start + query_len], k, v, head_dim**-0.5, window, softcap))
        start += query_len
    lengths = torch.tensor(requests, dtype=torch.int32)
    query_start = F.pad(lengths[:, 1].cumsum(0, dtype=torch.int32), (1, 0))
    arguments = (q, k_cache, v_cache, tables[:, : max(needed)], query_start, lengths[:, 0].contiguous())
    return Paged(arguments, torch.cat(expected))


def attention64(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, window: int, softcap: float
) -> torch.Tensor:
    group = q.shape[1] // k.shape[1]
    k, v = (t.double().repeat_interleave(group, 1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    scores = softcap * torch.tanh(scores / softcap) if softcap else scores
    seq_len = k.shape[0]
    distance = torch.arange(seq_len - q.shape[0], seq_len)[:, None] - torch.arange(seq_len)[None]
    hidden = (distance < 0) | (distance >= (window or seq_len))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -math.inf).softmax(-1), v)


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
    "group larger than a task": ({"requests": [(66, 2)], "heads": (100, 1), "head_dim": 16}, {}),
    "window": ({"requests": [(300, 1), (300, 140), (20, 20)]}, {"window": 50}),
    "window of one": ({"requests": [(40, 5)]}, {"window": 1}),
    "window wider than context": ({"requests": [(90, 20)]}, {"window": 4096}),
    "softcap": ({"requests": [(130, 10), (64, 1)]}, {"softcap": 2.0}),
    "softcap and window": ({"requests": [(200, 70)]}, {"softcap": 30.0, "window": 65}),
    "long context": ({"requests": [(4500, 3)], "block_size": 64, "heads": (2, 1)}, {}),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", list(ATTENTION_CASES))
def test_paged_attention_matches_float64(kernels: Implementation, dtype: torch.dtype, case: str) -> None:
    shape, options = ATTENTION_CASES[case]
    batch = paged(dtype, **shape, **options)
    out = torch.full_like(batch.arguments[0], math.nan)
    scale = out.shape[2] ** -0.5
    kernels.paged_attention(*batch.arguments, scale, **options, out=out)
    # NOTE: probabilities may be rounded to the dtype too, hence an error relative to |v| (a few units) as well.
    assert_close(out, batch.expected, 2.0 if dtype == torch.float32 else RELATIVE[dtype] / 2e-6)


def test_paged_attention_reads_strided_queries_and_allocates_its_result(kernels: Implementation) -> None:
    batch = paged(torch.float32, [(70, 5)])
    q, k_cache, v_cache, tables, query_start, seq_lens = batch.arguments
    result = kernels.paged_attention(strided(q), k_cache, v_cache, tables, query_start, seq_lens, 64**-0.5)
    assert_close(result, batch.expected, 2.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1024), (5, 1000), (3, 4, 128), (2, 3, 24)])
@pytest.mark.parametrize("unit_offset", [False, True])
def test_rms_norm_matches_float64(
    kernels: Implementation, dtype: torch.dtype, shape: tuple[int, ...], unit_offset: bool
) -> None:
    x, weight = normal(0, *shape, dtype=dtype), normal(1, shape[-1], dtype=dtype)
    expected = norm64(x.double(), weight, 1e-5, unit_offset)
    assert_close(kernels.rms_norm(strided(x), weight, 1e-5, unit_offset=unit_offset), expected, 1.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_adds_into_the_residual_and_norms_the_rounded_sum(kernels: Implementation, dtype: torch.dtype) -> None:
    x, residual, weight = (normal(i, 9, 520, dtype=dtype) for i in range(3))
    summed, weight = (residual.float() + x.float()).to(dtype), weight[0].contiguous()
    normed = kernels.rms_norm(x, weight, 1e-6, residual=residual)
    assert torch.equal(residual, summed)
    assert_close(normed, norm64(summed.double(), weight, 1e-6, False), 1.0)


def norm64(x: torch.Tensor, weight: torch.Tensor, eps: float, unit_offset: bool) -> torch.Tensor:
    normed = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    return normed * (weight.double() + (1.0 if unit_offset else 0.0))


def rope64(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotation of the pairs (d, d + half) as complex numbers."""
    half = cos.shape[-1]
    turned = torch.complex(x[..., :half], x[..., half : 2 * half]) * torch.complex(cos, sin)[:, None]
    return torch.cat((turned.real, turned.imag, x[..., 2 * half :]), -1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norms", ["none", "both", "both with unit offset"])
@pytest.mark.parametrize(("head_dim", "half", "block_size"), [(64, 32, 16), (128, 64, 8), (40, 20, 32), (96, 24, 16)])
def test_rope_and_write_rotates_and_stores(
    kernels: Implementation, dtype: torch.dtype, norms: str, head_dim: int, half: int, block_size: int
) -> None:
    tokens, num_heads, num_kv_heads = 7, 4, 2
    fused = normal(0, tokens, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    q, k, v = (fused.view(tokens, -1, head_dim)[:, heads] for heads in (slice(4), slice(4, 6), slice(6, 8)))
    angles = normal(1, 500, half)
    cos, sin = angles.cos().float(), angles.sin().float()
    positions = torch.tensor([3, 499, 0, 17, 18, 250, 4])
    slots = torch.tensor([3 * block_size + 5, 0, -1, block_size, 2 * block_size - 1, 4 * block_size, 1])
    arena = torch.full((5, 2, 2, num_kv_heads, block_size, head_dim), math.nan, dtype=dtype)
    k_cache, v_cache = arena[:, 1, 0], arena[:, 1, 1]
    weights = (normal(2, head_dim, dtype=dtype), normal(3, head_dim, dtype=dtype)) if norms != "none" else (None, None)
    unit_offset = norms == "both with unit offset"
    expected = []
    for heads, weight in zip((q, k), weights, strict=True):
        x = heads.double() if weight is None else norm64(heads.double(), weight, 1e-6, unit_offset)
        expected.append(rope64(x, cos[positions].double(), sin[positions].double()))
    original_v = v.clone()

    kernels.rope_and_write(
        q, k, v, cos, sin, positions, slots, k_cache, v_cache,
        q_norm=weights[0], k_norm=weights[1], norm_eps=1e-6, unit_offset=unit_offset,
    )  # fmt: skip

    assert_close(q, expected[0], 8.0)
    assert_close(k, expected[1], 8.0)
    assert torch.equal(v, original_v)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            assert torch.equal(k_cache[slot // block_size, :, slot % block_size], k[token])
            assert torch.equal(v_cache[slot // block_size, :, slot % block_size], v[token])
    assert int((~k_cache.isnan()).sum()) == int((~v_cache.isnan()).sum()) == 6 * num_kv_heads * head_dim
    assert arena[:, 0].isnan().all()
