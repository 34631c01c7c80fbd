"""Backends of recurrent layers' short convolution beside the reference in PyTorch; Triton's in interpreter mode."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from tandem.architecture.state import KVSpec, RecurrentSpec
from tandem.compute.arena import Arena
from tandem.compute.cuda.recurrent import TritonRecurrentBackend
from tandem.compute.layer_states import LayerRecurrent
from tandem.compute.native.recurrent import NativeRecurrentBackend
from tandem.compute.recurrent import RecurrentBatch, prepare_recurrent
from tandem.compute.step import AttentionBatch
from tandem.kvcache.spec import build_layout
from tests.helpers.native_kernels import load_or_skip
from tests.helpers.numbers import bits

CPU = torch.device("cpu")
CHANNELS, BLOCK_SIZE = 300, 8


def prepared_by(backend: str, batch: AttentionBatch, state: LayerRecurrent) -> RecurrentBatch:
    if backend == "triton":
        pytest.importorskip("triton", reason="triton is not installed")
        return TritonRecurrentBackend(CPU).prepare(batch, state, ())
    load_or_skip()
    return NativeRecurrentBackend(CPU).prepare(batch, state, ())


@pytest.mark.parametrize("backend", ["triton", "native"])
@pytest.mark.parametrize(
    ("taps", "dtype", "has_bias", "has_activation"),
    [(2, "float32", True, True), (4, "bfloat16", False, True), (3, "bfloat16", True, False)],
)
def test_convolution_is_that_of_the_reference(
    backend: str, taps: int, dtype: str, has_bias: bool, has_activation: bool
) -> None:
    """A request that begins, one whose prompt goes on over two blocks, and a decode that reads the page it writes. Of
    the second of three layers, whose columns lie in the second page of a block.
    """
    layout = build_layout([*[RecurrentSpec(CHANNELS, taps - 1, dtype)] * 3, KVSpec(1, 1, "float32")], BLOCK_SIZE)
    state, expected_state = (Arena(layout, 30, CPU).layers[1] for _ in range(2))
    assert isinstance(state, LayerRecurrent)
    assert isinstance(expected_state, LayerRecurrent)
    assert (state.num_pages, state.columns_page) == (3, 1)
    generator = torch.Generator().manual_seed(0)
    state.columns.copy_(torch.randn(state.columns.shape, generator=generator))
    expected_state.columns.copy_(state.columns)
    batch = AttentionBatch(
        query_start=torch.tensor([0, 3, 10, 11], dtype=torch.int32),
        seq_lens=torch.tensor([3, 18, 6], dtype=torch.int32),
        block_tables=torch.tensor([[1, 0, 0], [2, 3, 4], [5, 0, 0]], dtype=torch.int32),
        slot_mapping=torch.empty(0, dtype=torch.int64),
        max_query_len=7,
        max_seq_len=18,
        block_pages={block_id: np.array([block_id, block_id + 10, block_id + 20]) for block_id in range(1, 6)},
    )
    x = torch.randn(11, 2 * CHANNELS, generator=generator).to(state.columns.dtype)[:, :CHANNELS]
    weight = torch.randn(taps, CHANNELS, generator=generator)
    bias = torch.randn(CHANNELS, generator=generator) if has_bias else None
    expecting = prepare_recurrent(batch, expected_state)
    expected = expecting.convolve(x, weight, bias, expected_state, has_activation=has_activation)
    found = prepared_by(backend, batch, state).convolve(x, weight, bias, state, has_activation=has_activation)
    assert found.dtype == expected.dtype == x.dtype
    torch.testing.assert_close(found, expected)
    assert torch.equal(state.columns, expected_state.columns)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_bit_of_a_token_depends_on_how_its_prompt_is_divided(dtype: str) -> None:
    layout = build_layout([RecurrentSpec(CHANNELS, 3, dtype)], BLOCK_SIZE)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2 * BLOCK_SIZE, CHANNELS, generator=generator).to(getattr(torch, dtype))
    weight = torch.randn(4, CHANNELS, generator=generator)
    found = []
    for ends in ([16], [1, 16], [7, 8, 16], [3, 4, 5, 6, 15, 16]):
        state = Arena(layout, 3, CPU).layers[0]
        assert isinstance(state, LayerRecurrent)
        parts = []
        for start, end in pairwise([0, *ends]):
            batch = AttentionBatch(
                query_start=torch.tensor([0, end - start], dtype=torch.int32),
                seq_lens=torch.tensor([end], dtype=torch.int32),
                block_tables=torch.tensor([[1, 2]], dtype=torch.int32),
                slot_mapping=torch.empty(0, dtype=torch.int64),
                max_query_len=end - start,
                max_seq_len=end,
            )
            prepared = prepared_by("native", batch, state)
            parts.append(prepared.convolve(x[start:end], weight, None, state, has_activation=True))
        found.append(torch.cat(parts))
    assert all(torch.equal(bits(found[0]), bits(other)) for other in found[1:])
