"""Division of steps into micro-batches, and what their inputs read and write between two pieces of a prompt."""

import random

import pytest
import torch

from tandem.architecture.state import KVSpec, RecurrentSpec
from tandem.engine.inputs import InputBuilder
from tandem.engine.stage_flow import joined_inputs, micro_batches
from tandem.kvcache.spec import build_layout
from tandem.scheduler.output import NewBlocks, ScheduledRequest, SchedulerOutput

BLOCK = 16


def step_of(*items: ScheduledRequest) -> SchedulerOutput:
    return SchedulerOutput((), items, ("gone",))


def prompt(name: str, start: int, num_tokens: int, **options: bool) -> ScheduledRequest:
    blocks = NewBlocks(([1],), (0,))
    return ScheduledRequest(name, start, list(range(start, start + num_tokens)), samples=True, blocks=blocks, **options)


def cuts_of(step: SchedulerOutput, num_stages: int) -> list[list[tuple[str, int, int]]]:
    return [
        [(part.item.request_id, part.item.start, part.item.end) for part in parts]
        for parts in micro_batches(step, num_stages, BLOCK)
    ]


def test_a_long_prompt_is_cut_between_blocks_into_pieces_that_fill_the_stages() -> None:
    step = step_of(prompt("long", 40, 512))
    pieces = cuts_of(step, 2)
    assert len(pieces) == 8
    assert [[(name, end % BLOCK)] for [(name, _, end)] in pieces[:-1]] == [[("long", 0)]] * 7
    assert {end - start for [(_, start, end)] in pieces[1:-1]} <= {48, 64, 80}


def test_a_short_prompt_is_cut_into_as_many_pieces_as_there_are_stages() -> None:
    assert cuts_of(step_of(prompt("short", 0, 60)), 2) == [[("short", 0, 32)], [("short", 32, 60)]]
    assert cuts_of(step_of(prompt("within a block", 17, 14)), 2) == [[("within a block", 17, 31)]]


def test_decodes_are_divided_whole_and_a_prompt_beside_them_in_pieces() -> None:
    decodes = [ScheduledRequest(str(i), 100, [7], samples=True) for i in range(8)]
    assert cuts_of(step_of(*decodes[:3]), 2) == [[(str(i), 100, 101) for i in range(3)]]
    assert [len(part) for part in cuts_of(step_of(*decodes), 2)] == [4, 4]
    first, second = cuts_of(step_of(*decodes, prompt("long", 0, 50)), 2)
    assert (first[-1], second) == (("long", 0, 16), [("long", 16, 50)])
    assert [item[0] for item in first[:-1]] == [str(i) for i in range(8)]


@pytest.mark.parametrize("option", ["scores_prompt", "num_drafts"])
def test_drafts_and_scored_prompts_stay_whole(option: str) -> None:
    assert len(cuts_of(step_of(prompt("whole", 0, 512, **{option: True})), 2)) == 1


def test_pieces_put_together_are_the_step() -> None:
    """Its tokens in order; only the last piece samples."""
    rng = random.Random(5)
    for _ in range(200):
        items = [
            prompt(str(i), rng.randrange(100), rng.choice([1, 1, 3, 17, 90, 300])) for i in range(rng.randint(1, 6))
        ]
        found: dict[str, list[ScheduledRequest]] = {}
        for parts in micro_batches(step_of(*items), rng.randint(2, 8), BLOCK):
            assert parts
            for part in parts:
                found.setdefault(part.item.request_id, []).append(part.item)
                assert part.whole is items[int(part.item.request_id)]
        assert list(found) == [item.request_id for item in items]
        for item in items:
            pieces = found[item.request_id]
            assert [token for piece in pieces for token in piece.token_ids] == item.token_ids
            assert [piece.start for piece in pieces] == [item.start, *(piece.end for piece in pieces[:-1])]
            assert [piece.samples for piece in pieces] == [False] * (len(pieces) - 1) + [True]


def test_a_state_passes_from_piece_to_piece_in_the_block_of_the_last_token() -> None:
    """Unless its own block is kept. The table of the request itself keeps its gaps."""
    state = RecurrentSpec(channels=12, columns=1, dtype="float32", heads=(1, 4, 4))
    layout = build_layout((state, KVSpec(num_kv_heads=1, head_dim=8, dtype="float32")), BLOCK)
    (recurrent,) = (index for index, group in enumerate(layout.groups) if not group.spec.can_rewind)
    blocks = [[1, 2, 3, 4], [1, 2, 3, 4]]
    blocks[recurrent] = [0, 8, 0, 9]
    builder = InputBuilder(layout, max_num_requests=2, max_model_len=64, device=torch.device("cpu"), wanted_groups=())
    item = ScheduledRequest("long", 0, list(range(60)), samples=True, blocks=NewBlocks(tuple(blocks), (0, 0)))
    builder.take(step_of(item))
    parts = [builder.build_parts(each) for each in micro_batches(step_of(item), 4, BLOCK)]
    tables = [part.batches[recurrent].block_tables.tolist() for part in parts]
    assert tables == [[[9]], [[9, 8]], [[0, 8, 9]], [[0, 8, 9, 9]]]
    assert [part.goes_on for part in parts] == [True, True, True, False]
    joined = joined_inputs(parts, [torch.zeros(int(not part.goes_on), 4) for part in parts])
    assert (joined.first_tokens, joined.sample_rows.tolist()) == ((48,), [0])
    after = builder.build(step_of(ScheduledRequest("long", 60, [7], samples=True)))
    assert after.batches[recurrent].block_tables.tolist() == [[0, 8, 0, 9]]
