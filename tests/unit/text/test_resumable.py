"""Templates are rendered from a later message on where the text before it is certain, and refused where it is not."""

from datetime import datetime
from typing import Any

import pytest

from tandem.text.chat_template import ChatTemplate
from tandem.text.resumption import ChangedInputsError
from tandem.text.seen_messages import NotResumableError
from tests.unit.text.turn_templates import ALTERNATING, CARRIED, LAST_QUESTION, LOOKAHEAD, MACROS

CALL = {"id": "a", "type": "function", "function": {"name": "look", "arguments": {"at": "x"}}}
ROUND: list[dict[str, Any]] = [
    {"role": "assistant", "content": "let me see", "tool_calls": [CALL], "reasoning_content": "Hm."},
    {"role": "tool", "tool_call_id": "a", "content": "seen"},
]
FIRST = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is there?"}]
ANSWER, NEXT = {"role": "assistant", "content": "This."}, {"role": "user", "content": "And?"}
LATER = "{% set last = messages[-1].content %}{% for m in messages %}{{ m.content }}{{ last }}{% endfor %}"
SECOND = (
    "{% if messages | length > 5 %}{{ messages[2].content }}{% endif %}{% for m in messages %}{{ m.role }}{% endfor %}"
)
MACRO = (
    "{% macro say(m) %}{{ m.content ~ messages[0].role }}{% endmacro %}{% for m in messages %}{{ say(m) }}{% endfor %}"
)
NOT_RESUMABLE = {
    "{% for m in messages %}{{ m.content }}{{ loop.length }}{% endfor %}": "loop.length",
    "{% for m in messages %}{{ m.content }}{{ messages | length }}{% endfor %}": "messages as a whole",
    "{% for m in messages %}{{ m.content }}{{ messages[loop.index0 + 2].role }}{% endfor %}": "neighbours",
    "{% for m in messages %}{{ m.content }}{{ strftime_now('%S') }}{% endfor %}": "a function that is not known",
    MACRO: "a macro of the template takes messages",
    "{% set ns = namespace() %}{% for m in messages %}{{ m.content ~ ns }}{% endfor %}": "no plain value",
    "{% for m in messages %}{{ m }}{% endfor %}{{ messages[0] }}": "whole messages",
    "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}": "a condition",
    "{{ messages | tojson }}": "no loop",
}


def template(source: str, year: int = 2026) -> ChatTemplate:
    return ChatTemplate({"default": source}, {"bos_token": "<s>"}, now=lambda: datetime(year, 1, 1))


def resumed(found: ChatTemplate, before: list[Any], after: list[Any], **variables: Any) -> str:
    """The text of `after` from the last message of `before` on, whose beginning it has."""
    start = len(before) - 1
    first = found.render_from(before, **variables)
    given = [after[0], *([{}] * (start - 2)), *after[start - 1 :]]
    rest = found.render_from(given, start, None, first.resumption, **variables)
    whole = found.render(after, **variables)
    assert whole == first.text[: first.num_before_kept] + rest.text
    return rest.text


@pytest.mark.parametrize("source", [LAST_QUESTION, MACROS, CARRIED, LOOKAHEAD])
def test_the_rounds_of_a_tool_are_rendered_alone(source: str) -> None:
    talk = [*FIRST, *ROUND, *ROUND, *ROUND]
    for num_rounds in (1, 2, 3):
        assert resumed(template(source), talk, [*talk, *(ROUND * num_rounds)], tools=[{"name": "look"}])


@pytest.mark.parametrize("source", [LAST_QUESTION, MACROS, CARRIED, ALTERNATING])
def test_a_next_question_is_rendered_alone(source: str) -> None:
    talk = [*FIRST, ANSWER, NEXT, ANSWER, NEXT]
    assert "And?" in resumed(template(source), talk, [*talk, ANSWER, NEXT])


@pytest.mark.parametrize("source", [LAST_QUESTION, MACROS, LOOKAHEAD])
def test_what_changes_earlier_messages_is_noticed(source: str) -> None:
    """The thoughts between calls are dropped once there is an answer, or another question."""
    found, talk = template(source), [*FIRST, *ROUND, *ROUND, *ROUND]
    with pytest.raises(ChangedInputsError):
        resumed(found, talk, [*talk, ANSWER, NEXT])
    if source != LOOKAHEAD:
        asked = [*FIRST, ANSWER, NEXT]
        assert resumed(found, asked, [*asked, *ROUND, ANSWER, NEXT])


def test_a_date_that_has_changed_is_noticed() -> None:
    talk = [*FIRST, ANSWER, NEXT, ANSWER, NEXT]
    former = template(ALTERNATING, 2025).render_from(talk).resumption
    with pytest.raises(ChangedInputsError):
        template(ALTERNATING, 2026).render_from([*talk, ANSWER, NEXT], len(talk) - 1, None, former)


def test_a_variable_that_depends_on_the_end_is_noticed() -> None:
    talk = [*FIRST, ANSWER, NEXT]
    assert resumed(template(LATER), talk, [*talk, ANSWER, NEXT])
    with pytest.raises(ChangedInputsError):
        resumed(template(LATER), talk, [*talk, NEXT, ANSWER])


def test_a_message_that_the_template_looks_at_and_that_was_not_kept_is_noticed() -> None:
    talk = [*FIRST, ANSWER, NEXT, ANSWER]
    with pytest.raises(NotResumableError, match="not kept"):
        resumed(template(SECOND), talk, [*talk, NEXT, ANSWER])


@pytest.mark.parametrize("source", NOT_RESUMABLE)
def test_other_templates_say_why_they_are_rendered_whole(source: str) -> None:
    with pytest.raises(NotResumableError, match=NOT_RESUMABLE[source]):
        template(source).render_from([*FIRST, ANSWER, NEXT])


def test_a_conversation_of_many_calls_takes_steps_in_proportion() -> None:
    """A template's search among later messages for each message would take more steps than are allowed."""
    talk = [*FIRST, *(ROUND * 1000), ANSWER, NEXT]
    assert template(LOOKAHEAD).render(talk).count("to=look") == 1000
