"""The Triton kernels in interpreter mode on CPU, against a float64 oracle over a poisoned arena.

bfloat16 is left to the GPU: the interpreter multiplies its bit patterns as integers.
"""

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tandem.compute.attention import AttentionBackend
from tandem.compute.cuda.triton_backend import TritonBackend
from tandem.compute.layer_states import TORCH_DTYPES
from tests.helpers.attention_cases import RequestCase, Shape, build_step, oracle, random_request
from tests.helpers.triton_interpreter import products

pytest.importorskip("triton", reason="triton is not installed")

TOLERANCE = {"float32": 1e-5, "float16": 3e-3}
SPLIT = 64
MIX = ((70, 1), (37, 9), (1, 1), (50, 50), (5, 2), (130, 1))  # (seq_len, query_len)


@pytest.fixture(scope="module")
def backend() -> AttentionBackend:
    return TritonBackend(torch.device("cpu"), split_tokens=SPLIT)


@pytest.fixture
def ordered_products() -> Iterator[None]:
    with products(ordered=True):
        yield


def mixed(shape: Shape, mix: tuple[tuple[int, int], ...] = MIX) -> list[RequestCase]:
    return [random_request(shape, seq_len, query_len, seed) for seed, (seq_len, query_len) in enumerate(mix)]


def attend(
    backend: AttentionBackend, shape: Shape, requests: list[RequestCase], max_seq_len: int | None = None
) -> torch.Tensor:
    step = build_step(shape, requests, max_seq_len=max_seq_len)
    return backend.attend(step.queries, step.kv, step.batch, step.params)


SHAPES = {
    "grouped heads": Shape(num_heads=8, num_kv_heads=2),
    "one head a group": Shape(num_heads=2, num_kv_heads=2),
    "group of three": Shape(num_heads=6, num_kv_heads=2, block_size=8),
    "group wider than a product": Shape(num_heads=20, num_kv_heads=1),
    "head_dim 80": Shape(head_dim=80, block_size=32),
    "head_dim 96": Shape(head_dim=96, block_size=128),
    "head_dim 128": Shape(head_dim=128, dtype="float16"),
    "head_dim 256": Shape(head_dim=256, num_heads=2, num_kv_heads=1),
    "window": Shape(window=21),
    "window of one": Shape(window=1),
    "window of whole blocks": Shape(window=32, block_size=16),
    "window over splits": Shape(window=100, block_size=64),
    "softcap": Shape(softcap=2.0),
    "softcap and window": Shape(softcap=5.0, window=40, block_size=8, dtype="float16"),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_mixed_batch_equals_oracle(backend: AttentionBackend, shape: Shape) -> None:
    """Also proves that nothing else is read: all other bytes of the arena are NaN."""
    requests = mixed(shape)
    expected = torch.cat([oracle(shape, request) for request in requests])
    out = attend(backend, shape, requests)
    assert out.dtype == TORCH_DTYPES[shape.dtype]
    torch.testing.assert_close(out.double(), expected, atol=TOLERANCE[shape.dtype], rtol=0)


@pytest.mark.usefixtures("ordered_products")
@pytest.mark.parametrize("shape", [Shape(), Shape(window=21, softcap=5.0)], ids=["full", "window"])
def test_alone_equals_batched_bit_for_bit(backend: AttentionBackend, shape: Shape) -> None:
    """Including decodes whose batch needs several splits when they alone need one."""
    requests = mixed(shape)
    batched = attend(backend, shape, requests)
    start = 0
    for request in requests:
        end = start + request.queries.shape[0]
        assert torch.equal(attend(backend, shape, [request]), batched[start:end])
        start = end


def test_a_larger_grid_changes_nothing(backend: AttentionBackend) -> None:
    """A captured graph launches for the longest possible sequence; programs past the end must not write."""
    shape = Shape()
    requests = mixed(shape, ((70, 1), (3, 1)))
    assert torch.equal(attend(backend, shape, requests), attend(backend, shape, requests, max_seq_len=10 * SPLIT))


@pytest.mark.usefixtures("ordered_products")
@pytest.mark.parametrize("window", [None, 17])
def test_chunks_equal_whole_bit_for_bit(backend: AttentionBackend, window: int | None) -> None:
    """Tiles of a token start at the same positions for any cut of its prompt."""
    shape = Shape(window=window)
    request = random_request(shape, 90, 90, seed=3)
    whole = attend(backend, shape, [request])
    for chunk in (2, 13, 40):
        assert torch.equal(attend(backend, shape, [request.tail(chunk)]), whole[-chunk:])


@pytest.mark.parametrize("shape", [Shape(), Shape(window=40)], ids=["full", "window"])
@pytest.mark.parametrize("query_len", [3, 70])
def test_an_infinite_value_reaches_no_token_that_does_not_see_it(
    backend: AttentionBackend, shape: Shape, query_len: int
) -> None:
    """Such as that of a draft token, which is then rejected, or of one that the window has left behind."""
    length = 150
    request = random_request(shape, length, query_len, seed=1)
    expected = oracle(shape, request)
    step = build_step(shape, [request])
    harmful = {length - 1: math.nan, length - query_len + 1: -math.inf}
    if shape.window:
        harmful[length - 60] = math.inf
    for position, value in harmful.items():
        block = step.batch.block_tables[0, position // shape.block_size]
        step.kv.values[block, 0, position % shape.block_size, 3] = value
    with np.errstate(invalid="ignore"):  # NOTE: the interpreter's numbers are NumPy's
        out = backend.attend(step.queries, step.kv, step.batch, step.params)
    group, num_right = shape.num_heads // shape.num_kv_heads, 0
    for token in range(query_len):
        position = length - query_len + token
        seen = range(max(0, position + 1 - (shape.window or length)), position + 1)
        is_right = harmful.keys().isdisjoint(seen)
        assert bool(out[token, :group].isfinite().all()) == is_right
        heads = slice(0 if is_right else group, None)
        torch.testing.assert_close(out[token, heads].double(), expected[token, heads], atol=1e-5, rtol=0)
        num_right += is_right
    assert num_right == (20 if shape.window and query_len == 70 else 1)


def test_strided_queries(backend: AttentionBackend) -> None:
    """Queries are a slice of the fused projection's output."""
    shape = Shape()
    step = build_step(shape, mixed(shape))
    fused = torch.full((step.queries.shape[0], shape.num_heads + 4, shape.head_dim), math.nan)
    fused[:, : shape.num_heads] = step.queries
    out = backend.attend(fused[:, : shape.num_heads], step.kv, step.batch, step.params)
    assert torch.equal(out, backend.attend(step.queries, step.kv, step.batch, step.params))


@pytest.mark.usefixtures("ordered_products")
@pytest.mark.parametrize("window", [None, 700])
def test_long_contexts_cross_levels_of_splits(backend: AttentionBackend, window: int | None) -> None:
    """With splits from 64 tokens up, levels begin at 512 and 1,536."""
    shape = Shape(num_heads=2, num_kv_heads=1, head_dim=16, block_size=64, window=window)
    requests = mixed(shape, ((512, 1), (513, 1), (1536, 1), (1700, 1), (20, 1)))
    expected = torch.cat([oracle(shape, request) for request in requests])
    batched = attend(backend, shape, requests)
    torch.testing.assert_close(batched.double(), expected, atol=1e-5, rtol=0)
    assert torch.equal(attend(backend, shape, requests[:1]), batched[:1])


def test_many_requests(backend: AttentionBackend) -> None:
    """More requests than any power of two nearby, short and long chunks side by side."""
    shape = Shape(num_heads=2, num_kv_heads=1, head_dim=16, block_size=8)
    mix = tuple((3 + 7 * index % 40, 1 + index % 3) for index in range(17))
    requests = mixed(shape, (*mix, (75, 75)))
    expected = torch.cat([oracle(shape, request) for request in requests])
    torch.testing.assert_close(attend(backend, shape, requests).double(), expected, atol=1e-5, rtol=0)
