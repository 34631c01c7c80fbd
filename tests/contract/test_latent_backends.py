"""Contract of every backend that attends over latents, against keys and values made of them in float64.

The arena is NaN wherever nobody's rows are, so that a read of memory that is nobody's shows as NaN.
"""

import math

import pytest
import torch

from tandem.architecture.state import KVSpec, LatentSpec
from tandem.compute.arena import Arena
from tandem.compute.attention import AttentionParams, LatentBackend
from tandem.compute.backends import BACKENDS, choose_backends
from tandem.compute.layer_states import TORCH_DTYPES, LayerLatents
from tandem.core.errors import ConfigurationError
from tandem.kvcache.spec import build_layout
from tests.contract.test_attention_backends import RELATIVE, normal
from tests.helpers.attention_cases import batch_of

CPU = torch.device("cpu")
DECODES = [(15, 1), (64, 1), (65, 1), (300, 1)]
MIXED = [(5, 5), (130, 1), (200, 77), (64, 2)]
SIZES = {"of DeepSeek": (512, 64, 4), "of Mistral": (256, 64, 8), "small": (16, 8, 3), "many heads": (32, 8, 128)}


@pytest.fixture(scope="module", params=BACKENDS[LatentSpec]["cpu"], ids=lambda entry: entry.name)
def backend(request: pytest.FixtureRequest) -> LatentBackend:
    created: LatentBackend = request.param.create(CPU)
    return created


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("requests", [DECODES, MIXED], ids=["decodes", "mixed"])
def test_attention_over_rows_matches_keys_and_values(
    backend: LatentBackend, dtype: str, size: str, requests: list[tuple[int, int]]
) -> None:
    """A row is the key of all heads, and its first `rank` numbers are the value."""
    rank, rotary_dim, num_heads = SIZES[size]
    spec = LatentSpec(rank, rotary_dim, dtype)
    if (reason := backend.refuses(spec, 16, 0.0)) is not None:
        pytest.skip(reason)
    layout = build_layout([spec] * 2, 16)
    needed = [-(-length // 16) for length, _ in requests]
    arena = Arena(layout, sum(needed) + 1, CPU)
    arena.pages.view(TORCH_DTYPES[dtype]).fill_(math.nan)
    latents = arena.layers[1]
    assert isinstance(latents, LayerLatents)
    free = (torch.randperm(sum(needed), generator=torch.Generator().manual_seed(0)) + 1).tolist()
    tables = torch.zeros(len(requests), max(needed), dtype=torch.int32)
    queries, expected, scale = [], [], (rank + rotary_dim) ** -0.5
    for index, (length, asked) in enumerate(requests):
        tables[index, : needed[index]] = torch.tensor([free.pop() for _ in range(needed[index])])
        positions = torch.arange(length)
        rows = normal(index, length, rank + rotary_dim, dtype=TORCH_DTYPES[dtype])
        latents.write(rows, tables[index, positions // 16].long() * 16 + positions % 16)
        queries.append(normal(index + 100, asked, num_heads, rank + rotary_dim, dtype=TORCH_DTYPES[dtype]))
        expected.append(over_keys(queries[-1].double(), rows.double(), rank, scale))
    batch = batch_of(requests, tables)
    params = AttentionParams(num_heads, scale)
    out = backend.attend(torch.cat(queries), latents, backend.prepare(batch, latents, {params}), params)
    wanted = torch.cat(expected)
    assert out.shape == (len(wanted), num_heads, rank)
    assert ((out.double() - wanted).abs() <= 2 * RELATIVE[TORCH_DTYPES[dtype]] * (1 + wanted.abs())).all()


def over_keys(queries: torch.Tensor, rows: torch.Tensor, rank: int, scale: float) -> torch.Tensor:
    """[num_queries, heads, rank], in float64."""
    scores = torch.einsum("qhd,kd->hqk", queries, rows) * scale
    first = len(rows) - len(queries)
    hidden = torch.arange(len(rows))[None, :] > first + torch.arange(len(queries))[:, None]
    return torch.einsum("hqk,kd->qhd", scores.masked_fill(hidden, -math.inf).softmax(-1), rows[:, :rank])


def test_a_token_without_a_slot_is_written_to_the_null_block_alone() -> None:
    layout = build_layout([LatentSpec(4, 2, "float32")], 8)
    arena = Arena(layout, 3, CPU)
    latents = arena.layers[0]
    assert isinstance(latents, LayerLatents)
    latents.write(torch.ones(2, 6), torch.tensor([-1, 17]))
    assert latents.rows[1].eq(0).all()
    assert latents.rows[2].sum(1).tolist() == [0, 6, 0, 0, 0, 0, 0, 0]


def test_what_no_backend_reads_is_refused_with_reasons() -> None:
    with pytest.raises(ConfigurationError) as error:
        choose_backends("native", CPU, build_layout([LatentSpec(600, 64, "float32")], 16), 0.0)
    assert "native: latent 600 + rotated key 64 float32, as K and V of one head: " in str(error.value)
    with pytest.raises(ConfigurationError, match="LatentSpec: varlen does not read this kind of state"):
        choose_backends("varlen", torch.device("cuda"), build_layout([LatentSpec(512, 64, "bfloat16")], 16), 0.0)


def test_a_model_of_both_kinds_has_a_backend_for_each() -> None:
    layout = build_layout([LatentSpec(16, 8, "float32"), KVSpec(1, 8, "float32")], 16)
    chosen = choose_backends("reference", CPU, layout, 0.0)
    assert {kind.__name__ for kind in chosen} == {"KVSpec", "LatentSpec"}
