"""Triton's attention over latents in interpreter mode on CPU, by the contract of its kind of state."""

import itertools
from collections.abc import Iterator

import pytest
import torch

from tandem.architecture.state import LatentSpec
from tandem.compute.arena import Arena
from tandem.compute.attention import AttentionParams
from tandem.compute.cuda.latents import TritonLatentBackend
from tandem.compute.layer_states import LayerLatents
from tandem.compute.step import AttentionBatch
from tandem.kvcache.spec import build_layout
from tests.contract.test_attention_backends import normal
from tests.contract.test_latent_backends import DECODES, MIXED
from tests.contract.test_latent_backends import test_attention_over_rows_matches_keys_and_values as check
from tests.helpers.triton_interpreter import products

pytest.importorskip("triton", reason="triton is not installed")

CPU = torch.device("cpu")


class Interpreted(TritonLatentBackend):
    """Serves every spec, on the CPU."""

    def refuses(self, spec: LatentSpec, block_size: int, softcap: float, *, sinks: bool = False) -> None:
        return None


@pytest.fixture(autouse=True)
def _products() -> Iterator[None]:
    with products(ordered=True):
        yield


@pytest.mark.parametrize(
    ("size", "dtype", "requests", "split_tokens"),
    [
        ("small", "bfloat16", DECODES, 64),
        ("small", "bfloat16", MIXED, 512),
        ("many heads", "float32", DECODES, 512),
        pytest.param("many heads", "float16", MIXED, 64, marks=pytest.mark.slow),
        pytest.param("of DeepSeek", "float16", DECODES, 64, marks=pytest.mark.slow),
        pytest.param("of Mistral", "bfloat16", MIXED, 512, marks=pytest.mark.slow),
    ],
)
def test_attention_over_rows_matches_keys_and_values(
    size: str, dtype: str, requests: list[tuple[int, int]], split_tokens: int
) -> None:
    check(Interpreted(CPU, split_tokens), dtype, size, requests)


def test_a_query_has_the_same_bits_alone_and_in_a_longer_launch() -> None:
    """A decode beside a prompt; launched for more splits than it has."""
    layout = build_layout([LatentSpec(16, 8, "float32")], 16)
    arena = Arena(layout, 12, CPU)
    latents = arena.layers[0]
    assert isinstance(latents, LayerLatents)
    latents.rows.copy_(normal(0, *latents.rows.shape))
    queries, params, backend = normal(1, 6, 3, 24).float(), AttentionParams(3, 0.2), Interpreted(CPU, 64)

    def batch(starts: list[int], lengths: list[int], tables: torch.Tensor, longest: int) -> AttentionBatch:
        return AttentionBatch(
            query_start=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
            block_tables=tables,
            slot_mapping=torch.empty(0, dtype=torch.int64),
            max_query_len=max(b - a for a, b in itertools.pairwise(starts)),
            max_seq_len=longest,
        )

    tables = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]], dtype=torch.int32)
    both = backend.attend(queries, latents, batch([0, 5, 6], [20, 70], tables, 70), params)
    alone = backend.attend(queries[5:], latents, batch([0, 1], [70], tables[1:], 700), params)
    assert torch.equal(alone, both[5:])
    chunk = backend.attend(queries[3:5], latents, batch([0, 2], [20], tables[:1], 20), params)
    assert torch.equal(chunk, both[3:5])


def test_refusals_name_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, spec = TritonLatentBackend(torch.device("cuda")), LatentSpec(512, 64, "bfloat16")
    assert TritonLatentBackend(CPU).refuses(spec, 16, 0.0) == "device cpu is not CUDA"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert backend.refuses(spec, 16, 0.0) is None
    assert "its rank is above 512" in str(backend.refuses(LatentSpec(600, 64, "bfloat16"), 16, 0.0))
    assert "no soft-capping over latents" in str(backend.refuses(spec, 16, 30.0))
    assert "no attention sinks over latents" in str(backend.refuses(spec, 16, 0.0, sinks=True))
    assert "block_size=24" in str(backend.refuses(spec, 24, 0.0))
