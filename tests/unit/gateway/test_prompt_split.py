"""Each token of a prompt is billed as exactly one thing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.core.pins import Pin
from tandem.gateway.prompt_split import LivePins, PromptSplit, split_prompt
from tandem.gateway.request import ChoiceResult

SHORT, LONG = 300.0, 3600.0


def test_a_first_pin_writes_and_the_next_request_reads() -> None:
    pins = (Pin(96, SHORT),)
    assert split_prompt(100, 0, pins, LivePins()) == PromptSplit(4, 0, 96, 0)
    assert split_prompt(100, 96, pins, LivePins(96, 0)) == PromptSplit(4, 96, 0, 0)


def test_a_longer_pin_over_a_shorter_one_is_written_anew() -> None:
    assert split_prompt(100, 96, (Pin(96, LONG),), LivePins(96, 0)) == PromptSplit(4, 0, 0, 96)


def test_a_conversation_that_grows_writes_only_what_is_new() -> None:
    assert split_prompt(200, 96, (Pin(160, SHORT),), LivePins(96, 0)) == PromptSplit(40, 96, 64, 0)


def test_an_hour_for_the_instructions_and_five_minutes_for_the_rest() -> None:
    pins = (Pin(48, LONG), Pin(96, SHORT))
    assert split_prompt(100, 0, pins, LivePins()) == PromptSplit(4, 0, 48, 48)
    assert split_prompt(100, 96, pins, LivePins(96, 48)) == PromptSplit(4, 96, 0, 0)


def test_what_was_kept_and_lost_is_input_and_what_was_found_without_a_pin_is_read() -> None:
    assert split_prompt(100, 0, (Pin(96, SHORT),), LivePins(96, 0)) == PromptSplit(100, 0, 0, 0)
    assert split_prompt(100, 80, (), LivePins()) == PromptSplit(20, 80, 0, 0)


def test_no_more_is_read_than_the_prompt_has() -> None:
    assert split_prompt(100, 288, (), LivePins()) == PromptSplit(0, 100, 0, 0)
    assert split_prompt(100, 288, (Pin(96, SHORT),), LivePins()) == PromptSplit(0, 4, 96, 0)


def test_a_pin_that_was_not_granted_is_not_billed() -> None:
    assert split_prompt(100, 0, (Pin(0, LONG),), LivePins()) == PromptSplit(100, 0, 0, 0)


@pytest.mark.parametrize(
    ("live", "granted", "expected"),
    [
        (LivePins(), None, PromptSplit(4, 0, 0, 96)),
        (LivePins(96, 96), None, PromptSplit(4, 96, 0, 0)),
        (LivePins.of_everything(), None, PromptSplit(0, 100, 0, 0)),
        (LivePins.of_everything(), (Pin(96, LONG),), PromptSplit(100, 0, 0, 0)),
        (LivePins(96, 96), (Pin(96, LONG),), PromptSplit(100, 0, 0, 0)),
    ],
)
def test_what_is_expected_adds_up_and_gives_way_to_what_is_known(
    live: LivePins, granted: tuple[Pin, ...] | None, expected: PromptSplit
) -> None:
    """A book that was away once made a stream begin with two thousand million tokens read."""
    result = ChoiceResult(100, False, pins=(Pin(96, LONG),), granted=granted, live=live)
    assert result.expected_split == expected


@given(
    st.integers(1, 60),
    st.integers(0, 60),
    st.lists(st.tuples(st.integers(0, 60), st.sampled_from([SHORT, LONG, 1800.0])), max_size=4),
    st.integers(0, 60),
    st.integers(0, 60),
)
def test_every_token_is_one_thing(
    num_prompt: int, cached: int, pins: list[tuple[int, float]], live: int, live_long: int
) -> None:
    """Against an oracle that looks at one token at a time."""
    granted = [Pin(min(num, num_prompt), ttl) for num, ttl in pins]
    cached, live = min(cached, num_prompt), min(live, num_prompt)
    live_long = min(live_long, live)
    counts = {"input": 0, "read": 0, "short": 0, "long": 0}
    for token in range(num_prompt):
        is_long = any(token < pin.num_tokens and pin.ttl_s > SHORT for pin in granted)
        is_short = any(token < pin.num_tokens and pin.ttl_s <= SHORT for pin in granted)
        if is_long and token >= live_long:
            counts["long"] += 1
        elif is_short and not is_long and token >= live:
            counts["short"] += 1
        else:
            counts["read" if token < cached else "input"] += 1
    split = split_prompt(num_prompt, cached, granted, LivePins(live, live_long))
    assert split == PromptSplit(counts["input"], counts["read"], counts["short"], counts["long"])
