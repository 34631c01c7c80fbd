"""Parts of prompts: every token once, in order, and a place for the state that one part leaves to the next."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.engine.token_parts import TokenPart, tables_with_cuts, token_parts
from tandem.scheduler.output import ScheduledRequest


def chunk(start: int, num_tokens: int, **options: Any) -> ScheduledRequest:
    return ScheduledRequest("r", start, list(range(start, start + num_tokens)), samples=True, **options)


@given(
    start=st.integers(0, 300),
    num_tokens=st.integers(1, 600),
    num_contexts=st.integers(2, 8),
    block_size=st.sampled_from([1, 8, 16, 64]),
)
def test_the_parts_of_a_chunk_are_the_chunk(start: int, num_tokens: int, num_contexts: int, block_size: int) -> None:
    whole = chunk(start, num_tokens)
    found = [token_parts([whole], context, num_contexts, block_size) for context in range(num_contexts)]
    if num_tokens < num_contexts * block_size:
        assert found == [None] * num_contexts
        return
    parts = [part for parts in found for part in parts or ()]
    assert len(parts) == num_contexts
    assert [token for part in parts for token in part.item.token_ids] == whole.token_ids
    assert all(part.item.start == part.item.token_ids[0] for part in parts)
    assert [part.item.samples for part in parts] == [False] * (num_contexts - 1) + [True]
    inner = [part.item.start for part in parts[1:]]
    assert all(cut % block_size == 0 for cut in inner)
    assert [cut for part in parts for cut in part.cuts] == [cut for cut in inner for _ in range(2)]
    sizes = [part.item.num_tokens for part in parts]
    assert max(sizes) - min(sizes) <= 2 * block_size


def test_the_last_context_has_what_is_not_divided() -> None:
    """Drafts and prompts that are scored, whose logits are all asked for, and what is too short."""
    undivided = [chunk(0, 200, scores_prompt=True), chunk(10, 64, num_drafts=2), chunk(3, 31)]
    assert token_parts(undivided, 0, 2, 16) is token_parts(undivided, 1, 2, 16) is None
    step = [*undivided, chunk(0, 32)]
    first, last = (token_parts(step, context, 2, 16) for context in range(2))
    assert first == [TokenPart(ScheduledRequest("r", 0, list(range(16)), samples=False), step[3])]
    assert last is not None
    assert [part.item for part in last[:3]] == undivided
    assert last[3].item == ScheduledRequest("r", 16, list(range(16, 32)), samples=True)


@pytest.mark.parametrize("kept", [0, 40])
def test_a_state_goes_from_one_part_to_the_next_where_both_look_for_it(kept: int) -> None:
    """In the block that is kept after the cut, or else in that of the last token."""
    whole = chunk(30, 70)  # blocks 1 to 6 of 16 tokens, the last one begun
    table = np.array([[9, 8, 0, kept, 0, 0, 7]], dtype=np.int32)
    last_blocks = np.array([7], dtype=np.int32)
    found = []
    for context in range(2):
        parts = token_parts([whole], context, 2, 16)
        assert parts is not None
        num_blocks = -(-parts[0].item.end // 16)
        found.append(tables_with_cuts(table[:, :num_blocks], last_blocks, parts, 16)[0].tolist())
    assert found == [[9, 8, 0, kept or 7], [9, 8, 0, kept or 7, 0, 0, 7]]
    assert table[0].tolist() == [9, 8, 0, kept, 0, 0, 7], "the table of the request stays"
