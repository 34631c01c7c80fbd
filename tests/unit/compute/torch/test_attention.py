"""The reference backend against softmax attention written out in float64, over arenas poisoned with NaN."""

import pytest
import torch

from tandem.compute.attention import AttentionParams
from tandem.compute.layer_states import LayerKV
from tandem.compute.step import AttentionBatch
from tandem.compute.torch.attention import ReferenceBackend
from tests.helpers.attention_cases import Shape, build_step, oracle, random_request

SHAPES = {
    "plain": Shape(),
    "mha": Shape(num_kv_heads=4),
    "mqa": Shape(num_kv_heads=1),
    "window": Shape(window=20),
    "window-one": Shape(window=1),
    "softcap": Shape(softcap=3.0),
    "everything": Shape(num_heads=6, num_kv_heads=3, head_dim=40, block_size=8, window=13, softcap=5.0),
}


@pytest.mark.parametrize("name", SHAPES)
def test_mixed_batch_equals_the_definition(name: str) -> None:
    shape = SHAPES[name]
    lengths = [(1, 1), (37, 1), (50, 17), (33, 33), (64, 1)]
    requests = [random_request(shape, seq, query, seed) for seed, (seq, query) in enumerate(lengths)]
    step = build_step(shape, requests)
    out = ReferenceBackend().attend(step.queries, step.kv, step.batch, step.params)
    expected = torch.cat([oracle(shape, request) for request in requests])
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=3e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_rounded_once(dtype: str) -> None:
    shape = Shape(dtype=dtype)
    request = random_request(shape, 40, 9, seed=3)
    step = build_step(shape, [request])
    out = ReferenceBackend().attend(step.queries, step.kv, step.batch, step.params)
    assert out.dtype == step.queries.dtype
    expected = oracle(shape, request)
    torch.testing.assert_close(out.double(), expected.to(out.dtype).double(), rtol=0, atol=2e-2)


def test_window_counts_the_query_itself() -> None:
    """A window of 2 averages a token's value with its predecessor's: V of position p is p, K is zero."""
    values = torch.arange(8.0).view(1, 1, 8, 1)
    kv = LayerKV(keys=torch.zeros(1, 1, 8, 1), values=values)
    batch = AttentionBatch(
        query_start=torch.tensor([0, 8], dtype=torch.int32),
        seq_lens=torch.tensor([8], dtype=torch.int32),
        block_tables=torch.zeros(1, 1, dtype=torch.int32),
        slot_mapping=torch.arange(8),
        max_query_len=8,
        max_seq_len=8,
    )
    out = ReferenceBackend().attend(torch.ones(8, 1, 1), kv, batch, AttentionParams(1, 1.0, window=2))
    assert out.flatten().tolist() == [0.0, 0.5, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5]


def test_float64_is_computed_in_float64() -> None:
    shape = Shape(head_dim=16)
    request = random_request(shape, 12, 12, seed=1)
    step = build_step(shape, [request])
    kv = LayerKV(keys=step.kv.keys.double(), values=step.kv.values.double())
    out = ReferenceBackend().attend(step.queries.double(), kv, step.batch, step.params)
    torch.testing.assert_close(out, oracle(shape, request), rtol=0, atol=1e-13)


def test_padding_rows_come_back_as_zeros() -> None:
    shape = Shape()
    step = build_step(shape, [random_request(shape, 5, 1, seed=0)])
    padded = torch.cat((step.queries, torch.full_like(step.queries, torch.nan)))
    out = ReferenceBackend().attend(padded, step.kv, step.batch, step.params)
    assert out[1].eq(0).all()
