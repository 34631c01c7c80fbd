"""Translates the items of the Responses API into a `Conversation`.

Consecutive thinking, text and calls of the assistant become one message. Invariant: items keep their order, and a
call's output never appears without its call.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.core.errors import shown
from tandem.gateway.cache_lifetimes import MAX_BREAKPOINTS, lifetime_s
from tandem.gateway.conversation import UNREAD, Breakpoint, Conversation, Effort, Thinking
from tandem.gateway.errors import RequestError
from tandem.gateway.known_conversations import KnownConversation, ResumePlaces
from tandem.gateway.limits import check_free_form
from tandem.gateway.model import ServedModel
from tandem.gateway.openai.messages import DEFAULT_LIFETIME_S, MessageReader, moved
from tandem.gateway.openai.responses.fields import ResponsesBody, ResponsesPromptBody
from tandem.gateway.openai.responses.items import Item
from tandem.gateway.openai.responses.tools import read_format, read_tools


@dataclass(frozen=True, slots=True)
class ResumableItem:
    """The item at which a later body may be resumed (`known_conversations`).

    Args:
        number: index of its message in the conversation.
        places: where it and the message before it begin in the parsed body.
        calls: ids of the calls before it that a later body lacks, each with "" as name.
        num_unread: number of messages that a later body lacks, all after that of its first item.
    """

    number: int
    places: ResumePlaces
    calls: Mapping[str, str]
    num_unread: int


def read_conversation(
    asked: ResponsesPromptBody,
    items: Sequence[Mapping[str, Any]],
    model: ServedModel,
    max_items: int,
    known: KnownConversation | None = None,
) -> tuple[Conversation, ResumableItem | None]:
    """Returns the conversation, and the item at which a later body may be resumed, if there is one.

    Args:
        items: items of earlier responses and of this body, with references resolved.
        known: known conversation whose items the body lacks.

    Raises:
        RequestError: naming the part that is not supported.
    """
    num_items = len(items) + (0 if known is None else known.num_left_out)
    if num_items > max_items:
        raise RequestError(
            f"the conversation has {num_items} items, earlier ones included; at most {max_items} are taken",
            param="input",
        )
    tools, choice = read_tools(asked.tools, asked.tool_choice, asked.parallel_tool_calls)
    messages, reader, breakpoints, resume_item = _messages(asked, items, max_items, known)
    structured = asked.structured_outputs if isinstance(asked, ResponsesBody) else None
    conversation = Conversation(
        messages=messages,
        tools=tools,
        tool_choice=choice,
        output_format=read_format(None if asked.text is None else asked.text.format, structured),
        thinking=Thinking(_effort(asked, model)),
        variables=_variables(asked),
        breakpoints=breakpoints,
        call_ids=frozenset(reader.call_ids),
    )
    return conversation, resume_item


def chat_messages(
    items: Sequence[Mapping[str, Any]], known_calls: Iterable[str] = ()
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Translates items into messages of chat completions; yields each with the number of its first item.

    Raises:
        RequestError: an output has no call before it.
    """
    turn: dict[str, Any] = {}
    first = 0
    call_ids = set(known_calls)
    for number, item in enumerate(items):
        addition = _of_assistant(item)
        if turn and not (addition and _goes_on(turn, addition)):
            yield first, _finished(turn)
            turn = {}
        if addition:
            first = first if turn else number
            call_ids |= {call["id"] for call in addition.get("tool_calls", ())}
            turn = {**turn, **addition, "tool_calls": turn.get("tool_calls", []) + addition.get("tool_calls", [])}
        elif item["type"] == "function_call_output":
            yield number, _result(item, call_ids)
        else:
            yield number, {"role": item["role"], "content": _chat_parts(item["content"])}
    if turn:
        yield first, _finished(turn)


def _messages(
    asked: ResponsesPromptBody, items: Sequence[Mapping[str, Any]], max_items: int, known: KnownConversation | None
) -> tuple[list[Mapping[str, Any]], MessageReader, tuple[Breakpoint, ...], ResumableItem | None]:
    """Messages, their reader, breakpoints, and the item at which a later body may be resumed.

    NOTE: of a long chain's breakpoints only the latest count, as at OpenAI.
    """
    options = asked.prompt_cache_options
    ttl = None if options is None else options.ttl
    lifetime = DEFAULT_LIFETIME_S if ttl is None else lifetime_s(ttl, "prompt_cache_options")
    calls, num_unread = ({}, 0) if known is None else (known.calls, _num_unread(known))
    reader = MessageReader(lifetime, calls)
    numbered = list(chat_messages(items, calls))
    starts, messages = [number for number, _ in numbered], [message for _, message in numbered]
    _keep_latest_breakpoints(messages)
    num_before = 1 if asked.instructions else 0
    if asked.instructions:
        messages.insert(0, {"role": "system", "content": asked.instructions})
    if not messages:
        raise RequestError("input is empty; a response needs at least one item", param="input")
    read: list[Mapping[str, Any]] = [*reader.read(messages, max_items + 1)]
    resume_item = _resume_item(starts, reader, read, num_before, num_unread)
    head = num_before + 1
    read[head:head] = [UNREAD] * num_unread
    return read, reader, tuple(moved(point, head, num_unread) for point in reader.breakpoints), resume_item


def _num_unread(known: KnownConversation) -> int:
    assert isinstance(known.reader_state, int), "entries of one API are its own"
    return known.reader_state


def _resume_item(
    starts: Sequence[int],
    reader: MessageReader,
    messages: Sequence[Mapping[str, Any]],
    num_before: int,
    num_unread: int,
) -> ResumableItem | None:
    """Finds the last item at which a later body may be resumed: alone in its message, with no breakpoint in it or
    before.

    Args:
        starts: for each message that consists of items, the number of its first item.
        messages: the messages read; the first `num_before` consist of no items.
    """
    if len(starts) < 3 or starts[1] != 1 or messages[num_before]["role"] == "assistant":
        return None
    marked = [point.message for point in reader.breakpoints if point.message is not None and point.message > num_before]
    for number in range(min(marked, default=len(messages)) - 1, num_before + 1, -1):
        if messages[number]["role"] != "assistant":
            places = ResumePlaces(starts[number - num_before], starts[number - num_before - 1])
            left_out = number - 2 - num_before + num_unread
            return ResumableItem(number + num_unread, places, reader.calls_before(number - 1), left_out)
    return None


def _keep_latest_breakpoints(messages: Sequence[Mapping[str, Any]]) -> None:
    parts = [part for message in messages if isinstance(message["content"], list) for part in message["content"]]
    for part in [part for part in parts if "prompt_cache_breakpoint" in part][:-MAX_BREAKPOINTS]:
        del part["prompt_cache_breakpoint"]


def _of_assistant(item: Mapping[str, Any]) -> dict[str, Any]:
    """The item as part of an assistant's message; empty for items that are not the assistant's."""
    match item["type"]:
        case "reasoning":
            return {"reasoning_content": "".join(part["text"] for part in item.get("content") or ())}
        case "function_call":
            function = {"name": item["name"], "arguments": item["arguments"]}
            return {"tool_calls": [{"id": item["call_id"], "type": "function", "function": function}]}
        case "message" if item["role"] == "assistant":
            return {"content": _chat_parts(item["content"])}
    return {}


def _goes_on(turn: Mapping[str, Any], addition: Mapping[str, Any]) -> bool:
    """Whether `addition` continues the message: thinking, then text, then calls; any other order begins a new one."""
    if "reasoning_content" in addition:
        return False
    return "tool_calls" in addition or not ("content" in turn or turn["tool_calls"])


def _finished(turn: dict[str, Any]) -> dict[str, Any]:
    message = {"role": "assistant", "content": "", **turn}
    return {name: value for name, value in message.items() if name == "content" or value}


def _result(item: Mapping[str, Any], call_ids: set[str]) -> dict[str, Any]:
    if item["call_id"] not in call_ids:
        raise RequestError(
            f"there is no function_call with the call_id {shown(item['call_id'])} before its function_call_output",
            param="input",
        )
    output = item["output"]
    content = output if isinstance(output, str) else _chat_parts(output)
    return {"role": "tool", "tool_call_id": item["call_id"], "content": content or ""}


def _chat_parts(parts: Sequence[Mapping[str, Any]]) -> list[Item]:
    return [_chat_part(part) for part in parts]


def _chat_part(part: Mapping[str, Any]) -> Item:
    if part["type"] == "refusal":
        return {"type": "refusal", "refusal": part["refusal"]}
    point = part.get("prompt_cache_breakpoint")
    read: Item = {"type": "text", "text": part["text"]}
    return read if point is None else read | {"prompt_cache_breakpoint": point}


def _effort(asked: ResponsesPromptBody, model: ServedModel) -> Effort | None:
    """The reasoning effort; refused for a model that does not think."""
    effort = None if asked.reasoning is None else asked.reasoning.effort
    if model.answers.thinking is not None:
        return effort
    if effort not in (None, Effort.NONE):
        raise RequestError(
            f"reasoning.effort={effort} is for models that think, and {model.name!r} is not known to; leave it out",
            param="reasoning.effort",
            code="unsupported_parameter",
        )
    return None


def _variables(asked: ResponsesPromptBody) -> dict[str, Any]:
    """Template variables besides the messages. Raises RequestError for reserved names."""
    variables = dict(check_free_form(asked.chat_template_kwargs or {}, "chat_template_kwargs"))
    for name in ("tools", "documents", "messages", "add_generation_prompt"):
        if name in variables:
            raise RequestError(f"chat_template_kwargs may not hold {name}", param="chat_template_kwargs")
    return variables
