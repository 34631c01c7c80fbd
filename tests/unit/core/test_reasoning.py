"""Begin and end of thinking, what of it counts, and when the budget leaves no choice."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.core.errors import InvalidRequestError
from tandem.core.reasoning import MAX_MARKER_TOKENS, Reasoning, ReasoningState

START, END = (1, 2), (3, 3, 4)


def _seen(state: ReasoningState) -> tuple[bool, bool, int | None]:
    return state.is_thinking, state.is_over, state.opening_token_id


def _after(reasoning: Reasoning, *token_ids: int) -> ReasoningState:
    state = ReasoningState(reasoning)
    for token_id in token_ids:
        state.observe(token_id)
    return state


def test_an_answer_that_does_not_begin_with_the_marker_is_no_thinking() -> None:
    state = _after(Reasoning(START, END))
    assert _seen(state) == (False, False, 1)
    state.observe(1)
    assert state.opening_token_id == 2
    state.observe(9)
    assert _seen(state) == (False, True, None)
    assert not _after(Reasoning(START, END), 9, 1, 2).is_thinking


def test_thinking_is_what_lies_between_the_markers() -> None:
    state = _after(Reasoning(START, END), *START, 7, 8)
    assert (state.is_thinking, state.num_tokens) == (True, 2)
    for token_id in END:
        state.observe(token_id)
    assert (state.is_over, state.num_tokens) == (True, 2)
    state.observe(1)
    state.observe(2)
    assert state.is_over


def test_without_a_marker_to_open_it_only_the_prompt_opens_thinking() -> None:
    assert ReasoningState(Reasoning((), END)).is_over
    assert ReasoningState(Reasoning((), END, is_open=True)).is_thinking
    assert ReasoningState(Reasoning(START, END, is_open=True)).opening_token_id is None


def test_an_end_that_breaks_off_was_thought() -> None:
    state = _after(Reasoning((), END, is_open=True), 3, 3, 3)
    assert (state.is_thinking, state.num_tokens) == (True, 1)
    state.observe(4)
    assert (state.is_over, state.num_tokens) == (True, 1)


def test_the_budget_forces_the_whole_marker() -> None:
    state = _after(Reasoning(START, END, max_tokens=2), *START)
    forced = []
    for wish in (7, 8, 9, 9, 9):
        forced.append(state.forced_token_id)
        state.observe(wish if forced[-1] is None else forced[-1])
    assert forced == [None, None, *END]
    assert (state.is_over, state.num_tokens) == (True, 2)


def test_no_budget_at_all_ends_thinking_at_once() -> None:
    assert ReasoningState(Reasoning((), END, is_open=True, max_tokens=0)).forced_token_id == 3


@given(
    st.lists(st.integers(1, 5), max_size=30), st.booleans(), st.none() | st.integers(0, 6), st.sampled_from([END, (3,)])
)
def test_however_a_model_thinks_the_budget_holds(
    wishes: list[int], is_open: bool, budget: int | None, end: tuple[int, ...]
) -> None:
    state = ReasoningState(Reasoning(START, end, is_open, budget))
    said: list[int] = []
    for wish in wishes:
        forced = state.forced_token_id
        said.append(wish if forced is None else forced)
        state.observe(said[-1])
        assert budget is None or state.num_tokens <= budget
    again = _after(Reasoning(START, end, is_open, budget), *said)
    assert (again.is_over, again.num_tokens, again.forced_token_id) == (
        state.is_over,
        state.num_tokens,
        state.forced_token_id,
    )


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"start_token_ids": (-1,)}, "start"),
        ({"start_token_ids": (True,)}, "start"),
        ({"start_token_ids": (1,) * (MAX_MARKER_TOKENS + 1)}, "start"),
        ({"end_token_ids": ()}, "end"),
        ({"end_token_ids": (1.5,)}, "end"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 2**31}, "max_tokens"),
        ({"max_tokens": "3"}, "max_tokens"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(fields: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidRequestError, match=name):
        Reasoning(**{"start_token_ids": START, "end_token_ids": END, **fields})
