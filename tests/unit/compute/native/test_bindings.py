"""Promise of the compiled kernels beyond the contract: a row's bits never depend on its company."""

import random
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tandem.architecture.feed_forward import Activation
from tandem.compute.native.bindings import NativeKernels, unavailable_reason
from tandem.compute.order import Order
from tests.helpers.native_kernels import ARCHITECTURES, load_or_skip
from tests.helpers.numbers import bits, normal

DTYPES = (torch.bfloat16, torch.float32, torch.float16)


@pytest.fixture(scope="module", params=ARCHITECTURES)
def kernels(request: pytest.FixtureRequest) -> NativeKernels:
    return load_or_skip(request.param)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [8, 40, 96, 1000, 1024])
def test_linear_rows_do_not_depend_on_the_batch(kernels: NativeKernels, dtype: torch.dtype, k: int) -> None:
    weight, bias = normal(0, 35, k, dtype=dtype), normal(1, 35, dtype=dtype)
    rows = normal(2, 70, k, dtype=dtype)
    alone = torch.cat([kernels.linear(row[None], weight, bias) for row in rows])
    for m in range(1, 71):
        assert torch.equal(bits(kernels.linear(rows[:m], weight, bias)), bits(alone[:m]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_rows_do_not_depend_on_blocks_of_rows(kernels: NativeKernels, dtype: torch.dtype) -> None:
    """More rows than are multiplied by a panel at once, or copied where the processor wants them as floats."""
    weight, rows = normal(0, 40, 72, dtype=dtype), normal(1, 1600, 72, dtype=dtype)
    alone = torch.cat([kernels.linear(row[None], weight) for row in rows])
    assert torch.equal(bits(kernels.linear(rows, weight)), bits(alone))
    gated = torch.cat([kernels.gated_linear(row[None], weight, weight, "silu") for row in rows])
    assert torch.equal(bits(kernels.gated_linear(rows, weight, weight, "silu")), bits(gated))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated_linear_rows_do_not_depend_on_the_batch(
    kernels: NativeKernels, dtype: torch.dtype, activation: Activation
) -> None:
    gate, up, rows = normal(0, 19, 200, dtype=dtype), normal(1, 19, 200, dtype=dtype), normal(2, 40, 200, dtype=dtype)
    alone = torch.cat([kernels.gated_linear(row[None], gate, up, activation) for row in rows])
    for m in (1, 2, 3, 5, 6, 7, 13, 40):
        assert torch.equal(bits(kernels.gated_linear(rows[:m], gate, up, activation)), bits(alone[:m]))


def test_results_do_not_depend_on_the_number_of_threads(kernels: NativeKernels) -> None:
    """Sizes that are worth several threads, and whose units end in the middle of blocks of rows."""
    rows, weight = normal(0, 200, 1000, dtype=torch.bfloat16), normal(1, 1001, 1000, dtype=torch.bfloat16)
    cache, table = normal(2, 61, 4, 16, 64, dtype=torch.bfloat16), torch.arange(61, dtype=torch.int32)[None]
    lengths, starts = torch.tensor([950], dtype=torch.int32), torch.tensor([0, 200], dtype=torch.int32)
    q = rows[:, :512].reshape(200, 8, 64)
    before = torch.get_num_threads()
    results = []
    for threads in (1, 2, 3, 7):
        torch.set_num_threads(threads)
        attended = kernels.paged_attention(q, cache, cache, table, starts, lengths, 0.125)
        gated = kernels.gated_linear(rows, weight, weight, "silu")
        results.append((kernels.linear(rows, weight), gated, kernels.rms_norm(rows, weight[0], 1e-6), attended))
    torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (70, 0.0), (0, 20.0), (33, 5.0)])
@pytest.mark.parametrize(("num_heads", "head_dim", "block_size"), [(4, 64, 16), (6, 40, 8), (2, 128, 128)])
def test_attention_of_a_token_does_not_depend_on_how_it_is_computed(
    kernels: NativeKernels,
    dtype: torch.dtype,
    window: int,
    softcap: float,
    num_heads: int,
    head_dim: int,
    block_size: int,
) -> None:
    """Whole prompt, chunks of several sizes, and one token at a time, alone and beside another request."""
    length, num_blocks = 300, 2 * -(-300 // block_size) + 1
    k_cache, v_cache = (normal(i, num_blocks, 2, block_size, head_dim, dtype=dtype) for i in (0, 1))
    tables = (torch.arange(num_blocks - 1, dtype=torch.int32) + 1).view(2, -1)
    q = normal(2, length, num_heads, head_dim, dtype=dtype)

    def attend(start: int, end: int, *, company: int = 0) -> torch.Tensor:
        """Tokens [start, end) of request 0, with `company` tokens of request 1 behind them."""
        requests = [(end, end - start)] + ([(company, company)] if company else [])
        lengths = torch.tensor(requests, dtype=torch.int32)
        return kernels.paged_attention(
            torch.cat((q[start:end], q[:company])),
            k_cache,
            v_cache,
            tables[: len(requests)],
            F.pad(lengths[:, 1].cumsum(0, dtype=torch.int32), (1, 0)),
            lengths[:, 0].contiguous(),
            head_dim**-0.5,
            window,
            softcap,
        )[: end - start]

    whole = attend(0, length)
    assert torch.equal(bits(attend(0, length, company=100)), bits(whole))
    for chunk in (7, 64, 129):
        pieces = [attend(at, min(at + chunk, length), company=at % 3) for at in range(0, length, chunk)]
        assert torch.equal(bits(torch.cat(pieces)), bits(whole))
    for token in (0, 1, 15, 16, 63, 64, 65, 127, 128, 200, 299):
        assert torch.equal(bits(attend(token, token + 1)), bits(whole[token : token + 1]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [0, 70])
@pytest.mark.parametrize("num_tokens", [2, 3, 100])
@pytest.mark.parametrize("head_dim", [40, 64])
def test_an_infinite_value_reaches_no_token_that_does_not_see_it(
    kernels: NativeKernels, dtype: torch.dtype, window: int, num_tokens: int, head_dim: int
) -> None:
    """Such as that of a draft token, which is then rejected, or of one that the window has left behind."""
    length, block_size = 260, 16
    keys, values = (normal(i, 18, 2, block_size, head_dim, dtype=dtype) for i in (0, 1))
    table, q = torch.arange(1, 18, dtype=torch.int32)[None], normal(2, num_tokens, 4, head_dim, dtype=dtype)
    harmful = {length - 1, length - 70, length - num_tokens + 1}
    for key in harmful:
        values[1 + key // block_size, :, key % block_size, 3] = float("inf")

    def attend(start: int, end: int) -> torch.Tensor:
        starts, lengths = torch.tensor([0, end - start]), torch.tensor([length - num_tokens + end])
        where = table, starts.int(), lengths.int()
        return kernels.paged_attention(q[start:end], keys, values, *where, head_dim**-0.5, window)

    together = attend(0, num_tokens)
    for token in range(num_tokens):
        position = length - num_tokens + token
        seen = range(max(0, position - window + 1) if window else 0, position + 1)
        assert bool(together[token].isfinite().all()) == harmful.isdisjoint(seen)
        if harmful.isdisjoint(seen):
            assert torch.equal(bits(together[token]), bits(attend(token, token + 1)[0]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (150, 0.0), (0, 20.0)])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size"),
    [(4, 2, 64, 16), (6, 2, 40, 8), (2, 2, 128, 128), (40, 1, 32, 64)],
)
def test_decodes_with_a_prefix_in_common_get_the_bits_of_each_alone(
    kernels: NativeKernels,
    dtype: torch.dtype,
    window: int,
    softcap: float,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
) -> None:
    """Prefixes of prefixes, blocks read to different lengths, too short a share, and none; prompts among them."""
    common, longer, other = [list(range(first, first + 400)) for first in (0, 400, 800)]
    shares = [(common, 256)] * 30 + [(common[:16] + longer, 500)] * 6 + [(common[:1] + other, 128)] * 3
    shares += [(common, 40), (common, 0), (other, 448), (other, 448), (longer, 0)]
    own = iter(range(1200, 10**6))
    rng = random.Random(0)
    tables, requests = [], []
    for index, (blocks, num_shared) in enumerate(shares):
        length = max(1, num_shared + rng.choice((-70, 0, 1, 5, 63, 64, 65, 130)))
        num_blocks = -(-length // block_size)
        row = blocks[: num_shared // block_size]
        tables.append((row + [next(own) for _ in range(num_blocks)])[:num_blocks])
        requests.append((length, min(length, 20) if index % 17 == 5 else 1))
    order = rng.sample(range(len(shares)), len(shares))
    tables, requests = [tables[i] for i in order], [requests[i] for i in order]
    width = max(map(len, tables))
    block_tables = torch.tensor([row + [0] * (width - len(row)) for row in tables], dtype=torch.int32)
    num_cached = next(own)
    k_cache, v_cache = (normal(i, num_cached, num_kv_heads, block_size, head_dim, dtype=dtype) for i in (0, 1))
    lengths = torch.tensor(requests, dtype=torch.int32)
    starts = F.pad(lengths[:, 1].cumsum(0, dtype=torch.int32), (1, 0))
    q = normal(2, int(starts[-1]), num_heads, head_dim, dtype=dtype)

    def attend(rows: slice) -> torch.Tensor:
        first, last = int(starts[rows.start]), int(starts[rows.stop])
        begins = (starts[rows.start : rows.stop + 1] - first).contiguous()
        seq_lens, scale = lengths[rows, 0].contiguous(), head_dim**-0.5
        return kernels.paged_attention(
            q[first:last], k_cache, v_cache, block_tables[rows], begins, seq_lens, scale, window, softcap
        )

    alone = torch.cat([attend(slice(i, i + 1)) for i in range(len(requests))])
    before = torch.get_num_threads()
    for num_threads in (1, 2, 64):
        torch.set_num_threads(num_threads)
        assert torch.equal(bits(attend(slice(0, len(requests)))), bits(alone))
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_of_a_head_does_not_depend_on_the_others_of_its_group(
    kernels: NativeKernels, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads that share K and V are computed together, in registers or packed, or divided among threads."""
    cache, table = normal(0, 40, 1, 16, 64, dtype=dtype), torch.arange(40, dtype=torch.int32)[None]
    starts, lengths = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([630], dtype=torch.int32)
    q = normal(1, 1, 37, 64, dtype=dtype)

    def attend(heads: slice) -> torch.Tensor:
        return kernels.paged_attention(q[:, heads], cache, cache, table, starts, lengths, 0.125)

    alone = torch.cat([attend(slice(head, head + 1)) for head in range(37)], dim=1)
    for num_threads in (1, 2, 5):
        monkeypatch.setattr(torch, "get_num_threads", lambda number=num_threads: number)
        for num_heads in (*range(2, 18), 37):
            assert torch.equal(bits(attend(slice(0, num_heads))), bits(alone[:, :num_heads]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_threads", [1, 3])
def test_linear_by_head_has_the_bits_of_a_product_for_each_head(
    kernels: NativeKernels, dtype: torch.dtype, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`x` is a part of wider rows, as queries are. Packed matrices give the same bits."""
    weight, x = normal(0, 5, 96, 64, dtype=dtype), normal(1, 40, 5, 80, dtype=dtype)[..., 8:72]
    expected = torch.stack([kernels.linear(x[:, head], weight[head]) for head in range(5)], dim=1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    for rows in (1, 2, 40):
        assert torch.equal(bits(kernels.linear_by_head(x[:rows], weight)), bits(expected[:rows]))
    if kernels.can_pack((96, 64), dtype):
        packed = torch.stack([kernels.pack(matrix) for matrix in weight])
        found = kernels.linear_by_head(x, packed, order=Order.STRIPS)
        assert torch.equal(bits(found), bits(expected))


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_norm_and_rope_do_not_depend_on_the_batch(kernels: NativeKernels, dtype: torch.dtype) -> None:
    x, weight = normal(0, 50, 1000, dtype=dtype), normal(1, 1000, dtype=dtype)
    alone = torch.cat([kernels.rms_norm(row[None], weight, 1e-6) for row in x])
    assert torch.equal(bits(kernels.rms_norm(x, weight, 1e-6)), bits(alone))

    heads, norm = normal(2, 40, 12, 64, dtype=dtype), normal(3, 64, dtype=dtype)
    angles = normal(4, 40, 32, dtype=torch.float32)
    k_cache, v_cache = (torch.zeros(1, 4, 16, 64, dtype=dtype) for _ in range(2))

    def rotated(rows: slice) -> torch.Tensor:
        part = heads[rows].clone()
        positions = torch.arange(40)[rows]
        kernels.rope_and_write(
            part[:, :4], part[:, 4:8], part[:, 8:], angles.cos(), angles.sin(), positions,
            torch.full_like(positions, -1), k_cache, v_cache, q_norm=norm, k_norm=norm,
        )  # fmt: skip
        return part

    assert torch.equal(bits(rotated(slice(40))), bits(torch.cat([rotated(slice(i, i + 1)) for i in range(40)])))


def test_a_nan_in_one_row_stays_in_that_row(kernels: NativeKernels) -> None:
    rows, weight = normal(0, 9, 64, dtype=torch.bfloat16), normal(1, 10, 64, dtype=torch.bfloat16)
    rows[4, 7] = float("nan")
    nan_rows = kernels.gated_linear(rows, weight, weight, "silu").isnan()
    assert nan_rows[4].all()
    assert int(nan_rows.sum()) == 10


def test_a_broken_compiler_is_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "no-such-compiler"))
    reason = unavailable_reason(tmp_path)
    assert reason is not None
    assert "no-such-compiler" in reason
    assert "install g++ or set CXX" in reason


@pytest.mark.parametrize("m", [1, 2, 5, 40])
def test_linear_writes_every_element_of_out_and_nothing_else(kernels: NativeKernels, m: int) -> None:
    x, weight = normal(0, m, 48, dtype=torch.bfloat16), normal(1, 11, 48, dtype=torch.bfloat16)
    around = torch.full((m, 20), float("nan"), dtype=torch.bfloat16)
    assert kernels.linear(x, weight, out=around[:, 3:14]) is not None
    assert not around[:, 3:14].isnan().any()
    assert around[:, :3].isnan().all()
    assert around[:, 14:].isnan().all()
