"""Reads and writes of the model, step after step, worked out by hand."""

from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from tandem.architecture.state import KVSpec
from tandem.core.sampling_params import SamplingParams
from tandem.engine.inputs import InputBuilder
from tandem.kvcache.block_table import BlockTable
from tandem.kvcache.spec import build_layout
from tandem.scheduler.output import ScheduledRequest, SchedulerOutput
from tandem.scheduler.request import Request
from tandem.scheduler.step_deltas import StepDeltas

FULL = KVSpec(num_kv_heads=1, head_dim=8, dtype="float32")
WINDOWED = KVSpec(num_kv_heads=1, head_dim=8, dtype="float32", window=8)
LAYOUT = build_layout((FULL, WINDOWED), 8)


@pytest.fixture
def builder() -> InputBuilder:
    return InputBuilder(LAYOUT, max_num_requests=2, max_model_len=64, device=torch.device("cpu"), wanted_groups=(1,))


@pytest.fixture
def deltas() -> StepDeltas:
    return StepDeltas(lambda groups: {})


def make_request(name: str, num_tokens: int, **params: Any) -> Request:
    prompt = [100 + index for index in range(num_tokens)]
    return Request(name, prompt, SamplingParams(**params), 0, b"root", frozenset(), 10)


def table_of(*groups: Sequence[int]) -> BlockTable:
    return BlockTable(tuple(array("i", blocks) for blocks in groups), [0] * len(groups))


def step(*items: ScheduledRequest, released: tuple[str, ...] = ()) -> SchedulerOutput:
    return SchedulerOutput((), items, released)


def test_a_chunk_beside_a_decode(builder: InputBuilder, deltas: StepDeltas) -> None:
    long, short = make_request("long", 20), make_request("short", 3)
    long.num_computed_tokens, short.num_computed_tokens = 6, 2
    tables = table_of([4, 5], [6, 7]), table_of([1], [2])
    inputs = builder.build(step(deltas.schedule(long, 4, tables[0]), deltas.schedule(short, 1, tables[1])))
    assert inputs.input_ids.tolist() == [106, 107, 108, 109, 102]
    assert inputs.positions.tolist() == [6, 7, 8, 9, 2]
    assert inputs.sample_rows.tolist() == [0]
    full, windowed = inputs.batches
    assert full.query_start.tolist() == [0, 4, 5]
    assert full.seq_lens.tolist() == [10, 3]
    assert (full.max_query_len, full.max_seq_len) == (4, 10)
    assert full.block_tables.tolist() == [[4, 5], [1, 0]]
    assert full.slot_mapping.tolist() == [4 * 8 + 6, 4 * 8 + 7, 5 * 8 + 0, 5 * 8 + 1, 1 * 8 + 2]
    assert windowed.slot_mapping.tolist() == [6 * 8 + 6, 6 * 8 + 7, 7 * 8 + 0, 7 * 8 + 1, 2 * 8 + 2]


def test_hidden_states_are_asked_for_where_logits_are(builder: InputBuilder, deltas: StepDeltas) -> None:
    """Of a prompt's last token, of all tokens of a prompt that is scored, of none of an unfinished prompt."""
    chunk, scored = make_request("chunk", 20), make_request("scored", 12, prompt_logprobs=1)
    tables = table_of([4, 5], [6, 7]), table_of([1, 2], [3, 8])
    scored.num_computed_tokens = 9
    inputs = builder.build(step(deltas.schedule(chunk, 4, tables[0]), deltas.schedule(scored, 3, tables[1])))
    assert inputs.wanted is not None
    assert inputs.wanted.rows.tolist() == [4, 5, 6]
    assert list(inputs.wanted.batches) == [1], "of the groups, one is read for these tokens alone"
    batch = inputs.wanted.batches[1]
    assert (batch.query_start.tolist(), batch.seq_lens.tolist()) == ([0, 3], [12])
    assert (batch.max_query_len, batch.max_seq_len) == (3, 12)
    assert batch.block_tables.tolist() == [[3, 8]]
    assert (inputs.sample_rows.tolist(), inputs.first_rows[1]) == ([2], 0)
    chunk.num_computed_tokens = 4
    alone = builder.build(step(deltas.schedule(chunk, 4, tables[0]))).wanted
    assert alone is not None
    assert (alone.rows.tolist(), alone.batches[1].num_requests) == ([], 0)


def test_a_step_of_single_tokens_leaves_none_out(builder: InputBuilder, deltas: StepDeltas) -> None:
    """So it fits the captured decode graphs, whatever their requests are at."""
    chunk, last = make_request("chunk", 20), make_request("last", 1)
    tables = table_of([4], [6]), table_of([1], [3])
    inputs = builder.build(step(deltas.schedule(chunk, 1, tables[0]), deltas.schedule(last, 1, tables[1])))
    assert inputs.wanted is None
    assert inputs.sample_rows.tolist() == [1]
    scored = deltas.schedule(make_request("scored", 4, prompt_logprobs=0), 4, tables[0])
    assert builder.build(step(scored, released=("chunk", "last"))).wanted is None


def test_blocks_that_left_the_window_become_the_null_block(builder: InputBuilder, deltas: StepDeltas) -> None:
    """They were left in place once: harmless only while no backend touches a masked block."""
    request, table = make_request("a", 24), table_of([1, 2], [3, 4])
    builder.build(step(deltas.schedule(request, 16, table)))
    request.num_computed_tokens = 16
    table.drop_before(1, 1)
    table.groups[0].append(5)
    table.groups[1].append(6)
    full, windowed = builder.build(step(deltas.schedule(request, 8, table))).batches
    assert full.block_tables.tolist() == [[1, 2, 5]]
    assert windowed.block_tables.tolist() == [[0, 4, 6]]


def test_a_released_row_is_reused_without_its_past(builder: InputBuilder, deltas: StepDeltas) -> None:
    for name, block in (("a", 1), ("b", 2)):
        builder.build(step(deltas.schedule(make_request(name, 3), 3, table_of([block], [block]))))
    deltas.forget("a")
    again = deltas.schedule(make_request("a", 3), 3, table_of([9], [8]))
    full, windowed = builder.build(step(again, released=("a", "b"))).batches
    assert (full.block_tables.tolist(), windowed.block_tables.tolist()) == ([[9]], [[8]])


def test_the_last_row_moves_into_a_gap(deltas: StepDeltas) -> None:
    """So the batch is always the first rows of the tables: nothing is copied, whatever the contexts."""
    builder = InputBuilder(LAYOUT, max_num_requests=3, max_model_len=64, device=torch.device("cpu"), wanted_groups=(1,))
    first, second, third = (
        deltas.schedule(make_request(name, 9), 9, table_of([base, base + 1], [base + 2, base + 3]))
        for name, base in (("a", 10), ("b", 20), ("c", 30))
    )
    builder.build(step(first, second, third))
    second, third = replace(second, blocks=None), replace(third, blocks=None)
    inputs = builder.build(step(second, third, released=("a",)))
    full, windowed = inputs.batches
    assert full.block_tables.tolist() == [[30, 31], [20, 21]]
    assert windowed.block_tables.tolist() == [[32, 33], [22, 23]]
    assert full.slot_mapping.tolist() == [240 + i for i in range(8)] + [248] + [160 + i for i in range(8)] + [168]
    assert inputs.wanted is not None
    assert inputs.wanted.rows.tolist() == [8, 17]
    assert inputs.sample_rows.tolist() == [1, 0]
    assert inputs.first_rows == (1, 0)
    assert full.block_tables.data_ptr() == builder.build(step(third)).batches[0].block_tables.data_ptr()


def test_requests_that_are_left_out_of_a_step_keep_their_rows(builder: InputBuilder, deltas: StepDeltas) -> None:
    items = [
        deltas.schedule(make_request(name, 3), 3, table_of([block], [block])) for name, block in (("a", 1), ("b", 2))
    ]
    builder.build(step(*items))
    items = [replace(item, blocks=None) for item in items]
    assert builder.build(step(items[1])).batches[0].block_tables.tolist() == [[2]]
    assert builder.build(step(*reversed(items))).batches[0].block_tables.tolist() == [[1], [2]]
    assert builder.build(step(*reversed(items))).sample_rows.tolist() == [1, 0]
