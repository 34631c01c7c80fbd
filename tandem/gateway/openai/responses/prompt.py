"""Translates items into a conversation: consecutive thinking, text and calls of the assistant become one message.

Invariant: items keep their order, and a call's output never appears without its call.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tandem.core.errors import shown
from tandem.gateway.cache_marks import MAX_BREAKPOINTS, lifetime_s
from tandem.gateway.conversation import Breakpoint, Conversation, Effort, Thinking
from tandem.gateway.errors import RequestError
from tandem.gateway.limits import check_free_form
from tandem.gateway.model import ServedModel
from tandem.gateway.openai.messages import DEFAULT_LIFETIME_S, MessageReader
from tandem.gateway.openai.responses.fields import ResponsesBody, ResponsesPromptBody
from tandem.gateway.openai.responses.items import Item
from tandem.gateway.openai.responses.tools import read_format, read_tools


def read_conversation(
    asked: ResponsesPromptBody, items: Sequence[Mapping[str, Any]], model: ServedModel, max_items: int
) -> Conversation:
    """The conversation. `items`: earlier and new ones, with references resolved.

    Raises:
        RequestError: naming the part that is not supported.
    """
    if len(items) > max_items:
        raise RequestError(
            f"the conversation has {len(items)} items, earlier ones included; at most {max_items} are taken",
            param="input",
        )
    tools, choice = read_tools(asked.tools, asked.tool_choice, asked.parallel_tool_calls)
    messages, breakpoints = _messages(asked, items, max_items)
    structured = asked.structured_outputs if isinstance(asked, ResponsesBody) else None
    return Conversation(
        messages=messages,
        tools=tools,
        tool_choice=choice,
        output_format=read_format(None if asked.text is None else asked.text.format, structured),
        thinking=Thinking(_effort(asked, model)),
        variables=_variables(asked),
        breakpoints=breakpoints,
    )


def chat_messages(items: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """The equivalent messages of chat completions.

    Raises:
        RequestError: an output has no call before it.
    """
    turn: dict[str, Any] = {}
    call_ids: set[str] = set()
    for item in items:
        addition = _of_assistant(item)
        if turn and not (addition and _goes_on(turn, addition)):
            yield _finished(turn)
            turn = {}
        if addition:
            call_ids |= {call["id"] for call in addition.get("tool_calls", ())}
            turn = {**turn, **addition, "tool_calls": turn.get("tool_calls", []) + addition.get("tool_calls", [])}
        elif item["type"] == "function_call_output":
            yield _result(item, call_ids)
        else:
            yield {"role": item["role"], "content": _chat_parts(item["content"])}
    if turn:
        yield _finished(turn)


def _messages(
    asked: ResponsesPromptBody, items: Sequence[Mapping[str, Any]], max_items: int
) -> tuple[list[dict[str, Any]], tuple[Breakpoint, ...]]:
    """Messages and breakpoints. NOTE: of a long chain's breakpoints only the latest count, as at OpenAI."""
    options = asked.prompt_cache_options
    ttl = None if options is None else options.ttl
    reader = MessageReader(DEFAULT_LIFETIME_S if ttl is None else lifetime_s(ttl, "prompt_cache_options"))
    messages = list(chat_messages(items))
    _keep_latest_breakpoints(messages)
    if asked.instructions:
        messages.insert(0, {"role": "system", "content": asked.instructions})
    if not messages:
        raise RequestError("input is empty; a response needs at least one item", param="input")
    return reader.read(messages, max_items + 1), tuple(reader.breakpoints)


def _keep_latest_breakpoints(messages: Sequence[Mapping[str, Any]]) -> None:
    parts = [part for message in messages if isinstance(message["content"], list) for part in message["content"]]
    for part in [part for part in parts if "prompt_cache_breakpoint" in part][:-MAX_BREAKPOINTS]:
        del part["prompt_cache_breakpoint"]


def _of_assistant(item: Mapping[str, Any]) -> dict[str, Any]:
    """The item as part of an assistant's message; empty where it is not the assistant's."""
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
