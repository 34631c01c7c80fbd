"""Adapts conversations to templates that show only one system message, the first. Pure.

Invariant: no text is lost or reordered. System messages at the beginning are joined; a later one becomes a user message
and is joined to the user message beside it, since such templates often require alternating roles.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tandem.gateway.conversation import Conversation
from tandem.gateway.parsing.trial import trial

_SEPARATOR = "\n\n"
_MARKS = ("MarkFirst", "MarkSecond")


def shows_later_systems(template: str) -> bool:
    """Whether a chat template shows further system messages: one right after the first, and one after an answer."""
    first, second = ({"role": "system", "content": mark} for mark in _MARKS)
    answer, question = {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "Hi"}
    tried = ([first, second, question], [first, question, answer, second, question])
    shown = [trial(template, messages, begins_with_user=False) or "" for messages in tried]
    return all(mark in prompt for mark in _MARKS for prompt in shown)


def with_one_system(conversation: Conversation) -> Conversation:
    """Returns `conversation` with at most one system message, its first; breakpoints are moved with their text."""
    messages: list[Mapping[str, Any]] = []
    places: list[tuple[int, int]] = []  # of each message: its new number, and the characters before it there
    was_system = False
    for message in conversation.messages:
        is_system = message["role"] == "system"
        is_first = not messages or messages[-1]["role"] == "system"
        read = {**message, "role": "user"} if is_system and not is_first else message
        if messages and (is_system or was_system) and messages[-1]["role"] == read["role"]:
            before = messages[-1]["content"] + _SEPARATOR
            messages[-1] = {**messages[-1], "content": before + read["content"]}
            places.append((len(messages) - 1, len(before)))
        else:
            messages.append(read)
            places.append((len(messages) - 1, 0))
        was_system = is_system
    points = []
    for point in conversation.breakpoints:
        if point.message is not None:
            number, offset = places[point.message]
            point = replace(point, message=number, offset=offset + point.offset)
        points.append(point)
    return replace(conversation, messages=messages, breakpoints=tuple(points))
