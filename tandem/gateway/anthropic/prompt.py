"""Translates a body of Anthropic's Messages API into a `Conversation`.

Invariant: everything that a body asks for is in the conversation or is refused.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.gateway.anthropic.blocks import TextBlock, read_blocks
from tandem.gateway.anthropic.breakpoints import BreakpointList, read_ttl_s
from tandem.gateway.anthropic.fields import MessagesPromptBody
from tandem.gateway.anthropic.resumed import ResumableTurn, check_resumed, find_resumable
from tandem.gateway.anthropic.thinking import RequestedThinking, read_thinking, read_thinking_turns
from tandem.gateway.anthropic.tools import read_format, read_tools
from tandem.gateway.anthropic.turns import Turn, TurnWriter, read_turns
from tandem.gateway.conversation import Breakpoint, Conversation, Effort, Thinking
from tandem.gateway.errors import RequestError
from tandem.gateway.known_conversations import KnownConversation

# A client's accounting, new in every request, which would keep every prompt from being found in the cache.
BILLING_HEADER = "x-anthropic-billing-header:"


@dataclass(frozen=True, slots=True)
class ParsedPrompt:
    """The conversation of a body, and the thinking that the body asked for.

    Args:
        resume_turn: turn at which a later body may be resumed, if there is one.
    """

    conversation: Conversation
    thinking: RequestedThinking
    resume_turn: ResumableTurn | None = None


def read_prompt(body: MessagesPromptBody, max_messages: int, known: KnownConversation | None = None) -> ParsedPrompt:
    """Returns the conversation of a body; the system prompt is its first message.

    Args:
        known: known conversation whose messages the body lacks.

    Raises:
        RequestError: naming the part of the body that is not supported.
        CannotResumeError: the body has to be read as a whole.
    """
    if not body.messages:
        raise RequestError("messages is empty; at least one is needed", param="messages")
    num_messages = len(body.messages) + (0 if known is None else known.num_left_out)
    if num_messages > max_messages:
        raise RequestError(f"messages has {num_messages} entries; at most {max_messages} are taken", param="messages")
    num_thinking_turns = read_thinking_turns(body)
    asked, points = read_thinking(body), BreakpointList()
    tools, choice = read_tools(body, points)
    turns = read_turns(body.messages)
    skipped = None if known is None else check_resumed(turns, num_thinking_turns, known)
    writer = TurnWriter(points) if known is None else TurnWriter(points, known.calls)
    system = _system(body.system)
    if system:
        writer.write_texts("system", system)
    is_continued = _is_continued(turns, asked)
    writer.write(turns, num_thinking_turns, 0 if skipped is None else skipped.num_unread)
    resume_turn = None if is_continued else find_resumable(turns, writer, num_thinking_turns, skipped)
    _mark_last(body, writer.messages, points)
    conversation = Conversation(
        messages=writer.messages,
        tools=tools,
        tool_choice=choice,
        output_format=read_format(body),
        thinking=Thinking(Effort.NONE) if is_continued else asked.thinking,
        breakpoints=points.points,
        call_ids=writer.call_ids,
        is_continued=is_continued,
    )
    return ParsedPrompt(conversation, asked, resume_turn)


def _system(system: str | list[dict[str, Any]] | None) -> list[TextBlock]:
    """The system prompt's texts, without the billing header that some clients add."""
    blocks: list[TextBlock] = []
    for block in read_blocks("" if system is None else system, "system", "system"):
        assert isinstance(block, TextBlock)
        if block.text.startswith(BILLING_HEADER):
            block = TextBlock(block.text.partition("\n")[2], block.mark)
            if not block.text and block.mark is None:
                continue
        blocks.append(block)
    return [] if system is None else blocks


def _is_continued(turns: Sequence[Turn], asked: RequestedThinking) -> bool:
    """Whether the answer continues the last message. Raises RequestError where that cannot be done exactly."""
    last = turns[-1]
    if last.role != "assistant":
        return False
    last_text = last.texts[-1].text if last.texts else ""
    wrong = None
    if last.calls:
        wrong = "it calls tools, whose results must follow"
    elif not last_text or last_text != last_text.rstrip():
        wrong = "it must have text that does not end with white space"
    elif asked.is_required:
        wrong = "thinking comes before an answer, so it cannot be enabled"
    if wrong is not None:
        raise RequestError(f"the last message is the assistant's, to be continued: {wrong}", param="messages")
    return True


def _mark_last(body: MessagesPromptBody, messages: Sequence[Mapping[str, Any]], points: BreakpointList) -> None:
    """Adds the breakpoint of the request's own `cache_control` at the end of the last message."""
    ttl_s = read_ttl_s(body.cache_control, "the request")
    if ttl_s is not None and messages[-1]["content"]:
        last = len(messages) - 1
        points.add_last(Breakpoint(ttl_s, message=last, offset=len(messages[last]["content"])))
