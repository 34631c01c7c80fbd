"""Contract of every backend whose queries attend to chosen blocks of K and V, against the definition in float64.

The arena is NaN wherever a query has nothing to read, so that a read of anything else shows as NaN.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from tandem.architecture.block_mixers import COMPRESSED_KEYS, COMPRESSED_VALUES, MEANS, BlockChoice
from tandem.architecture.state import ChosenKVSpec
from tandem.compute.arena import Arena
from tandem.compute.attention import AttentionParams
from tandem.compute.backends import BACKENDS, choose_backends
from tandem.compute.block_scores import attend_to_compressed, choose_by_index, choose_by_means
from tandem.compute.block_sparse import ChosenKVBackend, HeadCache
from tandem.compute.layer_states import TORCH_DTYPES, LayerChosenKV
from tandem.compute.sparse import NOT_CHOSEN, QueryBatch
from tandem.core.errors import ConfigurationError
from tandem.kvcache.spec import build_layout
from tests.contract.test_attention_backends import RELATIVE, normal
from tests.helpers.attention_cases import batch_of

CPU = torch.device("cpu")
BLOCK_SIZE, HEADS, KV_HEADS, WIDTH = 16, 4, 2, 24
PARAMS = AttentionParams(num_heads=HEADS, scale=0.2)
MIXED = [(5, 5), (130, 1), (200, 77), (64, 2), (9, 1)]
SPEC = ChosenKVSpec(KV_HEADS, WIDTH, "float32", index_dim=16, summaries=(MEANS,), span=8)
CHOICES = [BlockChoice(8, 4), BlockChoice(40, 2), BlockChoice(16, 3, num_first=1, num_last=2)]


@pytest.fixture(scope="module", params=BACKENDS[ChosenKVSpec]["cpu"], ids=lambda entry: entry.name)
def backend(request: pytest.FixtureRequest) -> ChosenKVBackend:
    created: ChosenKVBackend = request.param.create(CPU)
    if (reason := created.refuses(SPEC, BLOCK_SIZE, 0.0)) is not None:
        pytest.skip(reason)
    return created


@dataclass
class Step:
    """Queries and cached keys and values of one step over several requests, each `(context, queries)`."""

    kv: LayerChosenKV
    batch: QueryBatch
    queries: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    slots: list[tuple[torch.Tensor, torch.Tensor]]


def make(dtype: str, requests: Sequence[tuple[int, int]]) -> Step:
    spec = ChosenKVSpec(KV_HEADS, WIDTH, dtype, index_dim=16, summaries=(MEANS,), span=8)
    needed = [-(-length // BLOCK_SIZE) for length, _ in requests]
    arena = Arena(build_layout([spec] * 2, BLOCK_SIZE), sum(needed) + 1, CPU)
    arena.pages.view(TORCH_DTYPES[dtype]).fill_(math.nan)
    kv = arena.layers[1]
    assert isinstance(kv, LayerChosenKV)
    free = (torch.randperm(sum(needed), generator=torch.Generator().manual_seed(0)) + 1).tolist()
    tables = torch.zeros(len(requests), max(needed), dtype=torch.int32)
    keys, values, slots = [], [], []
    for index, (length, _) in enumerate(requests):
        tables[index, : needed[index]] = torch.tensor([free.pop() for _ in range(needed[index])])
        positions = torch.arange(length)
        slots.append((tables[index][positions // BLOCK_SIZE].long(), positions % BLOCK_SIZE))
        keys.append(normal(index, length, KV_HEADS, WIDTH, dtype=TORCH_DTYPES[dtype]))
        values.append(normal(index + 50, length, KV_HEADS, WIDTH, dtype=TORCH_DTYPES[dtype]))
        kv.keys[slots[-1][0], :, slots[-1][1]] = keys[-1]
        kv.values[slots[-1][0], :, slots[-1][1]] = values[-1]
    batch = batch_of(requests, tables)
    queries = normal(99, sum(asked for _, asked in requests), HEADS, WIDTH, dtype=TORCH_DTYPES[dtype])
    return Step(kv, QueryBatch.of(batch), queries, keys, values, slots)


def some_blocks(batch: QueryBatch, choice: BlockChoice, num_sets: int) -> torch.Tensor:
    """Any blocks of those up to each query's own, which is among them."""
    most = min(choice.top_k, -(-batch.max_seq_len // choice.size))
    chosen = torch.full((len(batch.positions), num_sets, most), NOT_CHOSEN, dtype=torch.int32)
    rng = torch.Generator().manual_seed(3)
    for row, position in enumerate(batch.positions.tolist()):
        own = position // choice.size
        for number in range(num_sets):
            found = sorted({own, *torch.randperm(own + 1, generator=rng)[: most - 1].tolist()})
            chosen[row, number, : len(found)] = torch.tensor(found)
    return chosen


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
@pytest.mark.parametrize("choice", CHOICES, ids=str)
@pytest.mark.parametrize("num_sets", [KV_HEADS, HEADS])
def test_nothing_but_chosen_blocks_is_read(
    backend: ChosenKVBackend, dtype: str, choice: BlockChoice, num_sets: int
) -> None:
    step = make(dtype, MIXED)
    chosen = some_blocks(step.batch, choice, num_sets)
    read = {(request, head): set[int]() for request in range(len(MIXED)) for head in range(KV_HEADS)}
    tokens: dict[tuple[int, int], list[int]] = {}
    for row, (request, position) in enumerate(zip(step.batch.requests, step.batch.positions.tolist(), strict=True)):
        for number in range(num_sets):
            blocks = [int(each) for each in chosen[row, number] if each != NOT_CHOSEN]
            seen = [t for b in blocks for t in range(b * choice.size, min((b + 1) * choice.size, position + 1))]
            tokens[row, number] = seen
            read[int(request), number * KV_HEADS // num_sets] |= {*seen}
    for (request, head), positions in read.items():
        others = [t for t in range(MIXED[request][0]) if t not in positions]
        pages, offsets = (part[others] for part in step.slots[request])
        step.kv.keys[pages, head, offsets] = math.nan
        step.kv.values[pages, head, offsets] = math.nan
    out = backend.attend_to_blocks(step.queries, step.kv, step.batch, PARAMS, chosen, choice)
    assert out.shape == step.queries.shape
    for row, request in enumerate(step.batch.requests.tolist()):
        for head in range(HEADS):
            seen, own = tokens[row, head * num_sets // HEADS], head * KV_HEADS // HEADS
            scores = step.keys[request][seen, own].double() @ step.queries[row, head].double() * PARAMS.scale
            wanted = scores.softmax(0) @ step.values[request][seen, own].double()
            bound = 2 * RELATIVE[TORCH_DTYPES[dtype]] * (1 + wanted.abs())
            assert ((out[row, head].double() - wanted).abs() <= bound).all()


def test_an_infinite_compressed_value_reaches_no_query_that_does_not_see_it() -> None:
    """Such as that of draft tokens, which are then rejected."""
    span, length, context, asked = 8, 16, 48, 20
    spec = ChosenKVSpec(KV_HEADS, WIDTH, "float32", summaries=(COMPRESSED_KEYS, COMPRESSED_VALUES), span=span)
    kv = Arena(build_layout([spec], BLOCK_SIZE), 4, CPU).layers[0]
    assert isinstance(kv, LayerChosenKV)
    for seed, name in enumerate(kv.summaries):
        kv.summary(name).copy_(normal(seed, *kv.summary(name).shape, dtype=torch.float32))
    batch = QueryBatch.of(batch_of([(context, asked)], torch.tensor([[1, 2, 3]], dtype=torch.int32)))
    queries = normal(5, asked, HEADS, WIDTH, dtype=torch.float32)
    wanted, _ = attend_to_compressed(queries, kv, batch, BlockChoice(16, 2), scale=0.2, length=length)
    harmful = 5  # the sixth, which ends at the last token
    kv.summary(COMPRESSED_VALUES)[1 + harmful * span // BLOCK_SIZE, :, harmful * span % BLOCK_SIZE // span] = math.inf
    found, _ = attend_to_compressed(queries, kv, batch, BlockChoice(16, 2), scale=0.2, length=length)
    assert not found[-1].isfinite().any()
    torch.testing.assert_close(found[:-1], wanted[:-1])


def test_of_equal_scores_the_earliest_blocks_are_chosen() -> None:
    """All index keys and all means are zero."""
    step = make("float32", MIXED)
    assert step.kv.index_keys is not None
    step.kv.index_keys.zero_()
    step.kv.summary(MEANS).zero_()
    choice = BlockChoice(8, 4)
    by_index = choose_by_index(torch.ones(86, KV_HEADS, 16), step.kv, step.batch, choice)
    by_means = choose_by_means(step.queries, step.kv, step.batch, choice)
    assert by_index.shape == (86, KV_HEADS, 4)
    assert by_means.shape == (86, HEADS, 4)
    for row, position in enumerate(step.batch.positions.tolist()):
        own = position // 8
        wanted = sorted({own, *range(min(3, own))})
        for chosen in (*by_index[row], *by_means[row]):
            assert chosen.tolist() == wanted + [NOT_CHOSEN] * (4 - len(wanted))


@pytest.mark.parametrize(
    ("first", "others", "sign", "is_chosen"),
    [
        (math.nan, math.nan, 1, False),
        (math.inf, math.inf, 1, False),
        (-math.inf, -math.inf, 1, False),
        (math.inf, 0.5, 1, True),
        (math.inf, 0.5, -1, False),
    ],
)
def test_a_key_that_is_no_number_makes_no_choice_of_nobodys_blocks(
    first: float, others: float, sign: int, is_chosen: bool
) -> None:
    """Of 13 blocks with equal scores the fifth, with the spoiled key, has the lowest or the highest instead.

    `sign`: of the first numbers of the queries. A product of infinities of both signs is no number, and is the lowest.
    """
    step = make("float32", [(100, 3)])
    assert step.kv.index_keys is not None
    step.kv.index_keys.fill_(0.5)
    key = step.kv.index_keys[step.slots[0][0][40], step.slots[0][1][40]]
    key.fill_(others)
    key[0] = first
    queries = normal(1, 3, KV_HEADS, 16, dtype=torch.float32)
    queries[..., 0] = sign * queries[..., 0].abs()
    chosen = choose_by_index(queries, step.kv, step.batch, BlockChoice(8, 4))
    assert chosen.shape == (3, KV_HEADS, 4)
    for row, position in zip(chosen.flatten(0, 1).tolist(), [97, 97, 98, 98, 99, 99], strict=True):
        assert row == [0, 1, 5 if is_chosen else 2, position // 8]


def test_blocks_without_whole_spans_are_refused() -> None:
    spec = ChosenKVSpec(KV_HEADS, 64, "float32", summaries=(MEANS,), span=32)
    told = "block_size=16 has no whole spans of 32 tokens; choose a multiple of 32"
    with pytest.raises(ConfigurationError, match=told):
        choose_backends("reference", CPU, build_layout([spec], 16), 0.0)


def test_an_arena_whose_blocks_have_no_number_is_refused() -> None:
    pages = torch.empty(1 << 28, 2, 16, 72, device="meta")[..., :24]
    with pytest.raises(ConfigurationError, match=r"268435456 blocks are more than .*; give the KV cache at most \d+"):
        HeadCache.of(LayerChosenKV(pages, pages, None, {}, 1), 8)
