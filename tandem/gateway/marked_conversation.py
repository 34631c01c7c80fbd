"""Locates places of a conversation, such as cache breakpoints, in the prompt rendered from it.

A template may move, trim or repeat its input. So a random mark is inserted at the breakpoint into a copy of the
conversation, and the copy is rendered. The text before the mark that both prompts share is what the breakpoint keeps.
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tandem.gateway.conversation import Breakpoint, Conversation, Tool


@dataclass(frozen=True, slots=True)
class MarkedConversation:
    """A copy of a conversation with a random text, `mark`, inserted at one breakpoint."""

    conversation: Conversation
    mark: str

    @classmethod
    def of(cls, conversation: Conversation, place: Breakpoint) -> "MarkedConversation":
        """Inserts a mark at `place`.

        NOTE: the mark is letters and digits, which templates and JSON do not escape, and cannot be predicted.
        """
        mark = f"Mark{secrets.token_hex(8)}"
        messages, tools = list(conversation.messages), list(conversation.tools)
        if place.tool is not None:
            tools[place.tool] = _marked_tool(tools[place.tool], mark)
        elif place.message is not None:
            messages[place.message] = _marked_message(messages[place.message], place.offset, mark)
        return cls(replace(conversation, messages=messages, tools=tuple(tools), breakpoints=()), mark)

    def place(self, marked_prompt: str, prompt: str) -> int:
        """Number of characters of `prompt` before the breakpoint; 0 where the template does not show the mark."""
        before, found, _ = marked_prompt.rpartition(self.mark)
        return _num_shared(before.replace(self.mark, ""), prompt) if found else 0


def _marked_tool(tool: Tool, mark: str) -> Tool:
    """A tool with the mark inserted twice, since not every template shows all of a tool; the later one counts."""
    described = None if tool.description is None else tool.description + mark
    return replace(tool, description=described, parameters={**tool.parameters, mark: 0})


def _marked_message(message: Mapping[str, Any], offset: int, mark: str) -> Mapping[str, Any]:
    content = message.get("content") or ""
    return {**message, "content": content[:offset] + mark + content[offset:]}


def _num_shared(first: str, second: str) -> int:
    """Number of equal leading characters, found by bisection, since comparing whole slices is fast."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
