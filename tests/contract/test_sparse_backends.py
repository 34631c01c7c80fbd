"""Contract of every backend whose queries attend to chosen rows of latents, against the definition in float64.

The arena is NaN wherever nobody's rows and index keys are, so that a read of memory that is nobody's shows as NaN.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch

from tandem.architecture.state import IndexedLatentSpec
from tandem.compute.arena import Arena
from tandem.compute.attention import AttentionParams
from tandem.compute.backends import BACKENDS, choose_backends
from tandem.compute.layer_states import TORCH_DTYPES, LayerIndexedLatents
from tandem.compute.sparse import NOT_CHOSEN, IndexedLatentBackend, IndexQueries, QueryBatch, RowCache
from tandem.compute.step import AttentionBatch
from tandem.core.errors import ConfigurationError
from tandem.kvcache.spec import build_layout
from tests.contract.test_attention_backends import RELATIVE, normal
from tests.helpers.attention_cases import batch_of

CPU = torch.device("cpu")
BLOCK_SIZE = 16
PARAMS = AttentionParams(num_heads=4, scale=0.04)
MIXED = [(5, 5), (130, 1), (200, 77), (64, 2), (9, 1)]
SIZES = {"of DeepSeek": (512, 64, 128, 16), "small": (16, 8, 24, 7)}
TOP_K = 9
NEAR = 1e-5  # of scores about 1 in size, which differ by rounding


@pytest.fixture(scope="module", params=BACKENDS[IndexedLatentSpec]["cpu"], ids=lambda entry: entry.name)
def backend(request: pytest.FixtureRequest) -> IndexedLatentBackend:
    created: IndexedLatentBackend = request.param.create(CPU)
    return created


@dataclass
class Step:
    """Queries and cached latents and index keys of one step over several requests, each `(context, queries)`."""

    spec: IndexedLatentSpec
    latents: LayerIndexedLatents
    batch: AttentionBatch
    index: IndexQueries
    queries: torch.Tensor
    rows: list[torch.Tensor]
    keys: list[torch.Tensor]
    tables: torch.Tensor
    requests: Sequence[tuple[int, int]]

    def each(self) -> Iterator[tuple[int, int, int]]:
        """Of each query its row, request and position."""
        row = 0
        for request, (length, asked) in enumerate(self.requests):
            for position in range(length - asked, length):
                yield row, request, position
                row += 1

    def scores(self, row: int, request: int, position: int) -> torch.Tensor:
        """Of all tokens up to its own, float64."""
        products = self.keys[request][: position + 1].double() @ self.index.queries[row].double().T
        return (products * self.index.scale).relu() @ self.index.weights[row].double()


def make(dtype: str, size: str, requests: Sequence[tuple[int, int]], *, blank: bool = False) -> Step:
    """`blank`: all index queries are zero, and so are all scores."""
    rank, rotary_dim, index_dim, index_heads = SIZES[size]
    spec = IndexedLatentSpec(rank, rotary_dim, dtype, index_dim)
    needed = [-(-length // BLOCK_SIZE) for length, _ in requests]
    arena = Arena(build_layout([spec] * 2, BLOCK_SIZE), sum(needed) + 1, CPU)
    arena.pages.view(TORCH_DTYPES[dtype]).fill_(math.nan)
    latents = arena.layers[1]
    assert isinstance(latents, LayerIndexedLatents)
    free = (torch.randperm(sum(needed), generator=torch.Generator().manual_seed(0)) + 1).tolist()
    tables = torch.zeros(len(requests), max(needed), dtype=torch.int32)
    queries, index_queries, rows, keys = [], [], [], []
    for index, (length, asked) in enumerate(requests):
        tables[index, : needed[index]] = torch.tensor([free.pop() for _ in range(needed[index])])
        slots = slots_of(tables[index], torch.arange(length))
        rows.append(normal(index, length, rank + rotary_dim, dtype=TORCH_DTYPES[dtype]))
        keys.append(normal(index + 50, length, index_dim, dtype=TORCH_DTYPES[dtype]))
        latents.write(rows[-1], slots)
        latents.write_index_keys(keys[-1], slots)
        queries.append(normal(index + 100, asked, PARAMS.num_heads, rank + rotary_dim, dtype=TORCH_DTYPES[dtype]))
        index_queries.append(normal(index + 150, asked, index_heads, index_dim, dtype=TORCH_DTYPES[dtype]))
    batch = batch_of(requests, tables)
    asking = torch.cat(index_queries) * (0 if blank else 1)
    weights = normal(7, len(asking), index_heads, dtype=torch.float32)
    index_queries_of = IndexQueries(asking, weights, index_dim**-0.5)
    return Step(spec, latents, batch, index_queries_of, torch.cat(queries), rows, keys, tables, requests)


def slots_of(table: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    return table[positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE


def prepared(backend: IndexedLatentBackend, step: Step) -> QueryBatch:
    if (reason := backend.refuses(step.spec, BLOCK_SIZE, 0.0)) is not None:
        pytest.skip(reason)
    batch = backend.prepare(step.batch, step.latents, {PARAMS})
    assert isinstance(batch, QueryBatch)
    return batch


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_the_best_scores_are_chosen(backend: IndexedLatentBackend, dtype: str, size: str) -> None:
    step = make(dtype, size, MIXED)
    chosen = backend.choose(step.index, step.latents, prepared(backend, step), TOP_K)
    assert chosen.shape == (86, TOP_K)
    assert chosen.dtype == torch.int32
    for row, request, position in step.each():
        found = [int(each) for each in chosen[row] if each != NOT_CHOSEN]
        assert chosen[row, len(found) :].eq(NOT_CHOSEN).all()
        assert found == sorted({*found})
        assert len(found) == min(TOP_K, position + 1)
        scores = step.scores(row, request, position)
        least = scores.sort(descending=True).values[len(found) - 1]
        assert {*torch.nonzero(scores > least + NEAR).flatten().tolist()} <= {*found}
        assert (scores[found] >= least - NEAR).all()


def test_of_equal_scores_the_earliest_are_chosen(backend: IndexedLatentBackend) -> None:
    step = make("float32", "small", MIXED, blank=True)
    chosen = backend.choose(step.index, step.latents, prepared(backend, step), TOP_K)
    wanted = torch.arange(TOP_K).expand(86, TOP_K)
    positions = torch.tensor([position for _, _, position in step.each()])
    assert torch.equal(chosen.long(), wanted.where(wanted <= positions[:, None], NOT_CHOSEN))


SPOILED = {  # numbers of a key: the first, and the others; None = as they were
    "NaN": (math.nan, math.nan),
    "all inf": (math.inf, math.inf),
    "all -inf": (-math.inf, -math.inf),
    "one inf": (math.inf, None),
}
SIGNS = {"positive": (1, 1), "negative": (-1, -1), "of both signs": (1, -1)}  # of weights: the first, and the others


@pytest.mark.parametrize(
    ("spoiled", "signs", "is_chosen"),
    [
        *((spoiled, "positive", False) for spoiled in ("NaN", "all inf", "all -inf")),
        *((spoiled, "negative", True) for spoiled in ("NaN", "all inf", "all -inf")),
        ("one inf", "positive", True),
        ("one inf", "negative", False),
        ("one inf", "of both signs", False),
    ],
)
def test_a_product_that_is_no_number_is_zero_and_a_score_that_is_none_the_lowest(
    backend: IndexedLatentBackend, spoiled: str, signs: str, is_chosen: bool
) -> None:
    """One key of a hundred is spoiled: its products are inf - inf, or inf, whose weighted sum may be inf - inf again.

    Zero is the lowest score if all weights are positive, and the highest if all are negative.
    """
    step, place = make("float32", "small", [(100, 3)]), 40
    step.index.queries[..., 0].abs_()
    first, others = SIGNS[signs]
    step.index.weights.abs_().mul_(torch.tensor([first, *[others] * 6]))
    number, rest = SPOILED[spoiled]
    key = step.keys[0][place : place + 1].clone() if rest is None else torch.full((1, 24), rest)
    key[0, 0] = number
    step.latents.write_index_keys(key, slots_of(step.tables[0], torch.tensor([place])))
    chosen = backend.choose(step.index, step.latents, prepared(backend, step), TOP_K)
    assert chosen.shape == (3, TOP_K)
    for row, request, position in step.each():
        positions = chosen[row].tolist()
        assert positions == sorted({*positions})
        assert (place in positions) == is_chosen
        scores = step.scores(row, request, position)
        scores[place] = -math.inf
        found = [each for each in positions if each != place]
        assert (scores[found] >= scores.sort(descending=True).values[len(found) - 1] - NEAR).all()


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_nothing_but_chosen_rows_is_read(backend: IndexedLatentBackend, dtype: str, size: str) -> None:
    """The others become NaN once the choice is made; what is left is attended to as the definition reads."""
    step = make(dtype, size, MIXED)
    batch = prepared(backend, step)
    chosen = backend.choose(step.index, step.latents, batch, TOP_K)
    for request, (length, _) in enumerate(step.requests):
        read = {int(each) for row, of, _ in step.each() if of == request for each in chosen[row]}
        others = torch.tensor([position for position in range(length) if position not in read], dtype=torch.int64)
        nothing = torch.full((len(others), step.spec.size), math.nan, dtype=TORCH_DTYPES[dtype])
        step.latents.write(nothing, slots_of(step.tables[request], others))
    out = backend.attend(step.queries, step.latents, batch, PARAMS, chosen)
    assert out.shape == (86, PARAMS.num_heads, step.spec.rank)
    for row, request, _ in step.each():
        rows = step.rows[request][chosen[row][chosen[row] != NOT_CHOSEN].long()].double()
        weights = (step.queries[row].double() @ rows.T * PARAMS.scale).softmax(-1)
        wanted = weights @ rows[:, : step.spec.rank]
        assert ((out[row].double() - wanted).abs() <= 2 * RELATIVE[TORCH_DTYPES[dtype]] * (1 + wanted.abs())).all()


@pytest.mark.parametrize("top_k", [TOP_K, 100, 1000])
def test_a_query_chooses_and_finds_the_same_alone(backend: IndexedLatentBackend, top_k: int) -> None:
    """Each query in a step of its own, with another number of threads: the same positions; compiled, the same bits."""
    step, alone = make("bfloat16", "small", MIXED), 0
    batch = prepared(backend, step)
    chosen = backend.choose(step.index, step.latents, batch, top_k)
    out = backend.attend(step.queries, step.latents, batch, PARAMS, chosen)
    threads = torch.get_num_threads()
    torch.set_num_threads(1 + threads % 2)
    try:
        for row, request, position in step.each():
            one = AttentionBatch(
                query_start=torch.tensor([0, 1], dtype=torch.int32),
                seq_lens=torch.tensor([position + 1], dtype=torch.int32),
                block_tables=step.tables[request : request + 1],
                slot_mapping=torch.empty(0, dtype=torch.int64),
                max_query_len=1,
                max_seq_len=position + 1,
            )
            by_itself = backend.prepare(one, step.latents, {PARAMS})
            index = IndexQueries(step.index.queries[row : row + 1], step.index.weights[row : row + 1], step.index.scale)
            again = backend.choose(index, step.latents, by_itself, top_k)  # type: ignore[arg-type]
            assert again[0].tolist() == chosen[row, : again.shape[1]].tolist()
            assert chosen[row, again.shape[1] :].eq(NOT_CHOSEN).all()
            found = backend.attend(step.queries[row : row + 1], step.latents, by_itself, PARAMS, again)  # type: ignore[arg-type]
            alone += torch.equal(found[0], out[row])
    finally:
        torch.set_num_threads(threads)
    assert alone == 86 or backend.name == "reference"


def test_what_no_backend_reads_is_refused_with_reasons() -> None:
    with pytest.raises(ConfigurationError) as error:
        choose_backends("native", CPU, build_layout([IndexedLatentSpec(512, 64, "float32", 20)], 16), 0.0)
    assert "native: index_dim=20 is not a multiple of 8 up to 1024" in str(error.value)
    with pytest.raises(ConfigurationError) as error:
        choose_backends("native", CPU, build_layout([IndexedLatentSpec(600, 64, "float32", 24)], 16), 0.0)
    assert "rotated key 64 float32, index key 24, as K and V of one head: " in str(error.value)


def test_pages_between_rows_are_no_rows() -> None:
    """Rows of three layers and their index keys share a page whose size no row divides."""
    layout = build_layout([IndexedLatentSpec(16, 8, "float32", 8)] * 3, 8)
    latents = Arena(layout, 5, CPU).layers[2]
    assert isinstance(latents, LayerIndexedLatents)
    latents.rows.copy_(torch.arange(5 * 8 * 24).view(5, 8, 24))
    cache = RowCache.of(latents.rows)
    blocks, offsets = torch.tensor([0, 1, 3, 4]), torch.tensor([7, 0, 5, 7])
    found = cache.kv.keys[cache.numbers(blocks, offsets).long()]
    assert torch.equal(found.squeeze((1, 2)), latents.rows[blocks, offsets])


def test_an_arena_whose_rows_have_no_number_is_refused() -> None:
    page = torch.empty(1 << 28, 8, 72, device="meta")[..., :24]
    with pytest.raises(
        ConfigurationError, match=r"268435456 blocks are more than .*; give the KV cache at most \d+ blocks"
    ):
        RowCache.of(page)
