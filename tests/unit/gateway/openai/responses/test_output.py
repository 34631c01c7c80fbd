"""Events of every kind of answer are in order, and its items are what was said."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tandem.gateway.openai.responses.ids import new_response_id, response_of
from tandem.gateway.openai.responses.output import Event, Output
from tandem.gateway.openai.responses.writer import replayed
from tandem.gateway.parts import CallArguments, CallBegun, ContentText, Part, Thought
from tests.unit.gateway.openai.responses.machine import check_stream
from tests.unit.gateway.openai.responses.stage import frames_of

TEXT = st.text(min_size=1, max_size=5)


@st.composite
def answers(draw: st.DrawFn) -> list[Part]:
    """Thinking, then text and calls in any order, in pieces."""
    parts: list[Part] = [Thought(text) for text in draw(st.lists(TEXT, max_size=3))]
    num_calls = 0
    for is_call in draw(st.lists(st.booleans(), max_size=5)):
        pieces = draw(st.lists(TEXT, max_size=3))
        if is_call:
            parts += [
                CallBegun(num_calls, f"call_{num_calls}", "f"),
                *(CallArguments(num_calls, each) for each in pieces),
            ]
            num_calls += 1
        else:
            parts += [ContentText(each) for each in pieces]
    return parts


@given(answers(), st.booleans())
def test_events_add_up_to_the_items(parts: list[Part], is_complete: bool) -> None:
    output = Output(new_response_id())
    events = [event for part in parts for event in output.add(part)] + output.close(is_complete=is_complete)
    assert output.so_far == output.items
    response = check_stream(_framed(events, output.items, is_complete))
    _check_said(parts, response["output"])
    statuses = [item["status"] for item in output.items]
    assert all(status == "completed" for status in statuses[:-1])
    assert not statuses or (statuses[-1] == "completed") == is_complete
    assert len({item["id"] for item in output.items}) == len(output.items)
    assert {response_of(item["id"]) for item in output.items} <= {output._response_id}


@given(answers(), st.booleans())
def test_a_replay_tells_the_same(parts: list[Part], is_complete: bool) -> None:
    output = Output(new_response_id())
    for part in parts:
        output.add(part)
    output.close(is_complete=is_complete)
    response = _response(output.items, is_complete) | {"id": output._response_id}
    assert check_stream(frames_of(replayed(response, -1).decode())) == response


def _check_said(parts: list[Part], items: list[dict[str, Any]]) -> None:
    said = "".join(part.text for part in parts if isinstance(part, ContentText))
    thought = "".join(part.text for part in parts if isinstance(part, Thought))
    texts = {"message": "", "reasoning": ""}
    for item in items:
        if item["type"] != "function_call":
            texts[item["type"]] += item["content"][0]["text"]
    assert texts == {"message": said, "reasoning": thought}
    calls = [item for item in items if item["type"] == "function_call"]
    for index, call in enumerate(calls):
        arguments = "".join(part.text for part in parts if isinstance(part, CallArguments) and part.index == index)
        assert (call["call_id"], call["arguments"]) == (f"call_{index}", arguments)
    assert len(calls) == sum(isinstance(part, CallBegun) for part in parts)


def _framed(events: list[Event], items: list[dict[str, Any]], is_complete: bool) -> list[dict[str, Any]]:
    """As a writer would send them."""
    last = _response(items, is_complete)
    draft = last | {"status": "in_progress", "output": [], "usage": None}
    whole = [
        ("response.created", {"response": draft}),
        ("response.in_progress", {"response": draft}),
        *events,
        (f"response.{last['status']}", {"response": last}),
    ]
    return [{"type": kind, "sequence_number": number, **fields} for number, (kind, fields) in enumerate(whole)]


def _response(items: list[dict[str, Any]], is_complete: bool) -> dict[str, Any]:
    status = "completed" if is_complete else "incomplete"
    return {"id": "resp_1", "status": status, "output": items, "usage": {"total_tokens": 1}}
