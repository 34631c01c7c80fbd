"""Triton's short convolution in interpreter mode on CPU. Its recurrence has the contract of its kind of state."""

import numpy as np
import pytest
import torch

from tandem.architecture.state import KVSpec, RecurrentSpec
from tandem.compute.arena import Arena, LayerRecurrent
from tandem.compute.cuda.recurrent import TritonRecurrentBackend
from tandem.compute.recurrent import prepare_recurrent
from tandem.compute.step import AttentionBatch
from tandem.kvcache.spec import build_layout

pytest.importorskip("triton", reason="triton is not installed")

CPU = torch.device("cpu")
CHANNELS, BLOCK_SIZE = 300, 8


@pytest.mark.parametrize(("taps", "dtype", "has_bias"), [(2, "float32", True), (4, "bfloat16", False)])
def test_convolution_is_that_of_the_batch(taps: int, dtype: str, has_bias: bool) -> None:
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
    found = TritonRecurrentBackend(CPU).prepare(batch, state, ()).convolve(x, weight, bias, state)
    expected = prepare_recurrent(batch, expected_state).convolve(x, weight, bias, expected_state)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(state.columns, expected_state.columns)


def test_refusals_name_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = RecurrentSpec(64, 3, "bfloat16", (8, 64, 512))
    assert TritonRecurrentBackend(CPU).refuses(spec, 16, 0.0) == "device cpu is not CUDA"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    backend = TritonRecurrentBackend(torch.device("cuda"))
    assert "its matrices have more than 256 columns" in str(backend.refuses(spec, 16, 0.0))
    assert backend.refuses(RecurrentSpec(64, 3, "bfloat16"), 16, 0.0) is None
