"""Contract of every backend that attends to a window of rows and to entries, against the definition in float64.

The arena is NaN wherever a query has nothing to read, so that a read of anything else shows as NaN.
"""

import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from tandem.architecture.entry_states import EntriesSpec, RowsSpec
from tandem.compute.arena import Arena
from tandem.compute.attention import AttentionParams
from tandem.compute.backends import BACKENDS, choose_backends
from tandem.compute.entries import EntriesBackend, JointCache
from tandem.compute.layer_states import TORCH_DTYPES, LayerEntries, LayerRows
from tandem.compute.sparse import NOT_CHOSEN, IndexQueries, QueryBatch
from tandem.core.errors import ConfigurationError
from tandem.kvcache.spec import build_layout
from tests.contract.test_attention_backends import assert_close, normal
from tests.helpers.attention_cases import batch_of

CPU = torch.device("cpu")
BLOCK_SIZE, HEADS, WIDTH, KEY, INDEX_HEADS, WINDOW = 16, 4, 24, 16, 3, 20
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])
PARAMS = AttentionParams(HEADS, 0.2, WINDOW, sinks=SINKS)
MIXED = [(5, 5), (130, 1), (200, 77), (64, 2), (9, 1)]
SPANS = 4, 10, 64  # whole ones in a block, ones that begin in one and end in the next, and longer ones


@pytest.fixture(scope="module", params=BACKENDS[EntriesSpec]["cpu"], ids=lambda entry: entry.name)
def backend(request: pytest.FixtureRequest) -> EntriesBackend:
    created: EntriesBackend = request.param.create(CPU)
    if (reason := created.refuses(EntriesSpec(WIDTH, "float32", 4, KEY), BLOCK_SIZE, 0.0)) is not None:
        pytest.skip(reason)
    return created


@dataclass
class Step:
    """Queries and cached rows, entries and keys of one step over several requests, each `(context, queries)`."""

    rows: LayerRows
    entries: LayerEntries
    batches: tuple[QueryBatch, QueryBatch]
    queries: torch.Tensor
    kept_rows: list[torch.Tensor]
    kept_entries: list[torch.Tensor]
    kept_keys: list[torch.Tensor]


def make(
    span: int, requests: Sequence[tuple[int, int]] = MIXED, dtype: str = "float32", *, exact: bool = False
) -> Step:
    """`exact`: index keys are small whole numbers, so that many scores are equal."""
    specs = [RowsSpec(WIDTH, dtype, WINDOW), EntriesSpec(WIDTH, dtype, span, KEY)]
    needed = [-(-length // BLOCK_SIZE) for length, _ in requests]
    arena = Arena(build_layout(specs, BLOCK_SIZE), 2 * sum(needed) + 1, CPU)
    arena.pages.view(TORCH_DTYPES[dtype]).fill_(math.nan)
    rows, entries = arena.layers
    assert isinstance(rows, LayerRows)
    assert isinstance(entries, LayerEntries)
    pages = random.Random(1).sample(range(1, 2 * sum(needed) + 1), 2 * sum(needed))
    tables = [[[pages.pop() for _ in range(count)] for count in needed] for _ in range(2)]
    step = Step(rows, entries, (_batch(requests, tables[0]), _batch(requests, tables[1])), torch.empty(0), [], [], [])
    for index, (length, asked) in enumerate(requests):
        own = normal(index, length, WIDTH, dtype=TORCH_DTYPES[dtype])
        made = normal(index + 50, length // span, WIDTH, dtype=TORCH_DTYPES[dtype])
        keys = normal(index + 90, length // span, KEY, dtype=TORCH_DTYPES[dtype])
        step.kept_rows.append(own)
        step.kept_entries.append(made)
        step.kept_keys.append(keys.round() if exact else keys)
        for position in range(max(0, length - asked - WINDOW + 1), length):
            rows.rows[tables[0][index][position // BLOCK_SIZE], position % BLOCK_SIZE] = own[position]
        for number in range(length // span):
            last = (number + 1) * span - 1
            place = tables[1][index][last // BLOCK_SIZE], last % BLOCK_SIZE // span
            entries.entries[place] = made[number]
            assert entries.index_keys is not None
            entries.index_keys[place] = step.kept_keys[-1][number]
    step.queries = normal(7, sum(asked for _, asked in requests), HEADS, WIDTH, dtype=TORCH_DTYPES[dtype])
    return step


def _batch(requests: Sequence[tuple[int, int]], tables: list[list[int]]) -> QueryBatch:
    widest = max(map(len, tables))
    padded = [table + [0] * (widest - len(table)) for table in tables]
    return QueryBatch.of(batch_of(requests, torch.tensor(padded, dtype=torch.int32)))


def index_of(step: Step, *, exact: bool) -> IndexQueries:
    queries, weights = normal(3, len(step.queries), INDEX_HEADS, KEY), normal(4, len(step.queries), INDEX_HEADS)
    queries, weights = (queries.round(), weights.round()) if exact else (queries, weights)
    return IndexQueries(queries.to(step.queries.dtype), weights.float(), 0.25)


def naively_chosen(step: Step, index: IndexQueries, top_k: int) -> list[list[int]]:
    """Of each query the best of its entries, of equal ones the earlier, ascending."""
    batch, found = step.batches[1], list[list[int]]()
    for row, (request, position) in enumerate(zip(batch.requests.tolist(), batch.positions.tolist(), strict=True)):
        keys = step.kept_keys[request][: (position + 1) // step.entries.span].double()
        products = (keys @ index.queries[row].double().T).clamp_min(0) * index.scale
        scores = (products @ index.weights[row].double()).float().tolist()
        found.append(sorted(sorted(range(len(scores)), key=lambda number: (-scores[number], number))[:top_k]))
    return found


def naively_attended(step: Step, chosen: list[list[int]] | None) -> torch.Tensor:
    batch, found = step.batches[1], list[torch.Tensor]()
    for row, (request, position) in enumerate(zip(batch.requests.tolist(), batch.positions.tolist(), strict=True)):
        near = step.kept_rows[request][max(0, position - WINDOW + 1) : position + 1]
        far = step.kept_entries[request][: (position + 1) // step.entries.span]
        seen = torch.cat((near, far if chosen is None else far[chosen[row]])).double()
        scores = torch.cat((step.queries[row].double() @ seen.T * PARAMS.scale, SINKS.double()[:, None]), dim=1)
        found.append(scores.softmax(dim=1)[:, :-1] @ seen)
    return torch.stack(found)


def lists_of(chosen: torch.Tensor) -> list[list[int]]:
    """NOTE: what is not chosen is behind what is."""
    kept = [[number for number in row if number != NOT_CHOSEN] for row in chosen.tolist()]
    assert chosen.tolist() == [row + [NOT_CHOSEN] * (chosen.shape[1] - len(row)) for row in kept]
    return kept


@pytest.mark.parametrize("span", SPANS)
@pytest.mark.parametrize("top_k", [1, 7, 1000])
def test_the_best_entries_are_chosen_and_of_equal_ones_the_earlier(
    backend: EntriesBackend, span: int, top_k: int
) -> None:
    step = make(span, exact=True)
    index = index_of(step, exact=True)
    chosen = backend.choose(index, step.entries, step.batches[1], top_k)
    assert chosen.dtype == torch.int32
    assert chosen.shape[1] == min(top_k, 200 // span)
    assert lists_of(chosen) == naively_chosen(step, index, top_k)


@pytest.mark.parametrize("span", SPANS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_one_softmax_is_over_window_entries_and_sinks(backend: EntriesBackend, span: int, dtype: str) -> None:
    step = make(span, dtype=dtype)
    chosen = backend.choose(index_of(step, exact=False), step.entries, step.batches[1], 5)
    for of_some, listed in ((None, None), (chosen, lists_of(chosen))):
        found = backend.attend(step.queries, step.rows, step.entries, step.batches, PARAMS, of_some)
        assert found.dtype == step.queries.dtype
        assert_close(found, naively_attended(step, listed))


def test_a_long_step_is_computed_in_parts(backend: EntriesBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    step = make(4)
    index = index_of(step, exact=False)
    chosen = backend.choose(index, step.entries, step.batches[1], 5)
    whole = backend.attend(step.queries, step.rows, step.entries, step.batches, PARAMS, chosen)
    monkeypatch.setattr("tandem.compute.torch.entries._MOST_NUMBERS", 100)
    assert torch.equal(backend.choose(index, step.entries, step.batches[1], 5), chosen)
    parts = backend.attend(step.queries, step.rows, step.entries, step.batches, PARAMS, chosen)
    assert torch.equal(parts, whole)


def test_an_arena_with_too_many_rows_to_number_is_refused() -> None:
    pages = torch.empty(1 << 20, 3001, device="meta")
    rows, entries = (torch.unflatten(pages[:, start : start + 48], 1, (2, 24)) for start in (0, 49))
    with pytest.raises(ConfigurationError, match="1048576 blocks are more than entries can be found in; give"):
        JointCache.of(rows, entries)


def test_what_no_compiled_kernel_reads_is_refused_by_name() -> None:
    for spec, told in (
        (EntriesSpec(24, "float32", 4, 12), "native: index_dim=12 is not a multiple of 8 up to 1024"),
        (
            EntriesSpec(20, "float32", 4, 8),
            "native: entries of 20 float32 of each 4 tokens, index key 8, as K and V of",
        ),
        (RowsSpec(20, "float32", 8), "native: rows of 20 float32, window 8, as K and V of one head: head_dim=20"),
    ):
        with pytest.raises(ConfigurationError, match=re.escape(told)):
            choose_backends("native", CPU, build_layout([spec], BLOCK_SIZE), 0.0)
