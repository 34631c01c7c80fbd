"""Translates OpenAI's chat messages into those of a chat template. Parts that a text model cannot be shown are refused.

`developer` becomes `system`, the role that templates know; text parts are joined by line feeds; the arguments of a call
are parsed into an object, or wrapped in one where they are not valid JSON.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tandem.core.errors import shown
from tandem.gateway.cache_lifetimes import LIFETIMES_S, MAX_BREAKPOINTS, lifetime_s
from tandem.gateway.conversation import Breakpoint
from tandem.gateway.errors import RequestError
from tandem.gateway.exact import read_exactly

ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
DEFAULT_LIFETIME_S = LIFETIMES_S["30m"]  # as OpenAI has it
MAX_CALLS = 128  # tool calls in one message
_KNOWN = frozenset({"role", "content", "name", "refusal", "reasoning", "reasoning_content", "thinking", "tool_call_id"})
# What clients keep of an answer besides what it says, and send back with it.
_KEPT = frozenset(
    {"annotations", "id", "parsed", "provider_specific_fields", "reasoning_details", "thinking_blocks", "tool_calls"}
)
_ROLE_AND_TEXT = frozenset({"role", "content"})
_SPEAKERS = ROLES.keys() - {"tool"}
_PART_FIELDS = frozenset({"type", "text", "prompt_cache_breakpoint", "cache_control"})


class MessageReader:
    """Translates the messages of one request.

    `breakpoints`: cache breakpoints found so far. `call_ids`: for each call found so far, the index of its message; -1
    for calls in messages that a shortened body lacks.
    """

    def __init__(self, default_lifetime_s: float = DEFAULT_LIFETIME_S, call_ids: Iterable[str] = ()) -> None:
        self._default_lifetime_s = default_lifetime_s
        self.call_ids = dict.fromkeys(call_ids, -1)
        self.breakpoints: list[Breakpoint] = []

    def read(self, messages: Sequence[Mapping[str, Any]], max_messages: int) -> list[dict[str, Any]]:
        """Translates all messages. Raises RequestError naming the message, and the part of it, that is refused."""
        if not messages:
            raise RequestError("messages is empty; a chat needs at least one", param="messages")
        if len(messages) > max_messages:
            raise RequestError(
                f"messages has {len(messages)} entries; at most {max_messages} are taken", param="messages"
            )
        return [self._message(index, message) for index, message in enumerate(messages)]

    def _message(self, index: int, message: Mapping[str, Any]) -> dict[str, Any]:
        return _text_of_role(message) or self._checked(index, message)

    def _checked(self, index: int, message: Mapping[str, Any]) -> dict[str, Any]:
        where, role = f"messages[{index}]", message.get("role")
        if role == "function" or message.get("function_call"):
            remedy = "send tool_calls and the role tool"
            raise _refusal(f"{where}: function_call and the role function are not supported; {remedy}", where)
        if not isinstance(role, str) or role not in ROLES:
            raise _refusal(f"{where}.role={shown(role)} must be one of {', '.join(ROLES)}", where)
        known = _KNOWN | (_KEPT if role == "assistant" else {"tool_calls"})
        unknown = [name for name, value in message.items() if name not in known and value not in (None, [])]
        if unknown:
            raise _refusal(f"{where}.{shown(unknown[0])[1:-1]} is not supported by this server; leave it out", where)
        fields = {name: value for name, value in message.items() if name in _KNOWN and value is not None}
        for name, value in fields.items():
            if name != "content" and not isinstance(value, str):
                raise _refusal(f"{where}.{name}={shown(value)} must be text", where)
        read = {**fields, "role": ROLES[role], "content": self._content(message.get("content"), role, index)}
        if message.get("tool_calls"):
            read["tool_calls"] = self._calls(message["tool_calls"], role, index)
        if role == "tool":
            self._check_result(message.get("tool_call_id"), where)
        return read

    def _check_result(self, call_id: Any, where: str) -> None:
        if not isinstance(call_id, str) or call_id not in self.call_ids:
            raise _refusal(f"{where}.tool_call_id={shown(call_id)} must be the id of a call before it", where)

    def _calls(self, calls: Any, role: str, index: int) -> list[dict[str, Any]]:
        where = f"messages[{index}]"
        if role != "assistant" or not isinstance(calls, list) or len(calls) > MAX_CALLS:
            raise _refusal(f"{where}.tool_calls must be a list of at most {MAX_CALLS}, in an assistant message", where)
        read = [_call(call, f"{where}.tool_calls[{number}]") for number, call in enumerate(calls)]
        for call in read:
            self.call_ids.setdefault(call["id"], index)
        return read

    def calls_before(self, index: int) -> dict[str, str]:
        """Ids of the calls in messages before number `index`, each with "" as name, for `KnownConversation.calls`."""
        return {call_id: "" for call_id, number in self.call_ids.items() if number < index}

    def _content(self, content: Any, role: str, index: int) -> str:
        if isinstance(content, str):
            return content
        if content is None and role == "assistant":
            return ""
        where = f"messages[{index}].content"
        if isinstance(content, list) and content:
            return self._joined(content, index, where)
        raise _refusal(f"{where}={shown(content)} must be text or a list of text parts", where)

    def _joined(self, parts: Sequence[Any], index: int, where: str) -> str:
        texts: list[str] = []
        num_characters = -1
        for number, part in enumerate(parts):
            texts.append(_text(part, f"{where}[{number}]"))
            num_characters += 1 + len(texts[-1])
            lifetime = self._lifetime(part, f"{where}[{number}]")
            if lifetime is not None:
                self._mark(Breakpoint(lifetime, message=index, offset=num_characters), f"{where}[{number}]")
        return "\n".join(texts)

    def _mark(self, point: Breakpoint, where: str) -> None:
        if len(self.breakpoints) == MAX_BREAKPOINTS:
            raise RequestError(
                f"at most {MAX_BREAKPOINTS} cache breakpoints are taken; {where} is one too many", param="messages"
            )
        self.breakpoints.append(point)

    def _lifetime(self, part: Mapping[str, Any], where: str) -> float | None:
        """Lifetime of a part's breakpoint in OpenAI's form, or in Anthropic's, which proxies may pass on."""
        point, control = part.get("prompt_cache_breakpoint"), part.get("cache_control")
        if point is not None:
            if not isinstance(point, Mapping) or point.get("mode") != "explicit" or point.keys() - {"mode", "ttl"}:
                raise _refusal(
                    f'{where}.prompt_cache_breakpoint={shown(point)} must be {{"mode": "explicit"}}, with a ttl or not',
                    where,
                )
            ttl = point.get("ttl")
            return self._default_lifetime_s if ttl is None else lifetime_s(ttl, f"{where}.prompt_cache_breakpoint")
        if control is not None:
            is_known = isinstance(control, Mapping) and control.keys() <= {"type", "ttl"}
            if not is_known or control.get("type") != "ephemeral":
                raise _refusal(f'{where}.cache_control={shown(control)} must be {{"type": "ephemeral"}}', where)
            return lifetime_s(control.get("ttl") or "5m", f"{where}.cache_control")
        return None


def read_messages(messages: Sequence[Mapping[str, Any]], max_messages: int) -> list[dict[str, Any]]:
    """Translates messages without collecting breakpoints; raises as `MessageReader.read`."""
    return MessageReader().read(messages, max_messages)


def moved(point: Breakpoint, head: int, num_unread: int) -> Breakpoint:
    """Returns `point` with its message's index in the whole body: `num_unread` messages follow the first `head`."""
    is_later = point.message is not None and point.message >= head
    return replace(point, message=(point.message or 0) + num_unread) if is_later else point


def _text_of_role(message: Mapping[str, Any]) -> dict[str, Any] | None:
    """Translates a message with a role and text only, the fast path for most of a long chat; None for others."""
    if message.keys() != _ROLE_AND_TEXT or not isinstance(message["content"], str):
        return None
    role = message["role"]
    return {**message, "role": ROLES[role]} if isinstance(role, str) and role in _SPEAKERS else None


def _call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or call.get("type", "function") != "function":
        raise _refusal(f"{where}={shown(call)} must be a call of a function", where)
    name, call_id = function.get("name"), call.get("id")
    if not isinstance(name, str) or not isinstance(call_id, str):
        raise _refusal(f"{where} must have an id and a function with a name", where)
    arguments = _arguments(function.get("arguments"), where)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _arguments(given: Any, where: str) -> Mapping[str, Any]:
    """The parsed arguments of a call. NOTE: models write invalid JSON, and clients send back what they received."""
    if isinstance(given, Mapping):
        return given
    if not isinstance(given, str | None):
        raise _refusal(f"{where}.function.arguments={shown(given)} must be text", where)
    try:
        read = read_exactly(given or "{}")
    except ValueError:
        read = None
    return read if isinstance(read, dict) else {"arguments": given}


def _text(part: Any, where: str) -> str:
    if not isinstance(part, Mapping):
        raise _refusal(f"{where}={shown(part)} must be an object with a type", where)
    kind = part.get("type")
    if kind == "refusal" and isinstance(part.get("refusal"), str):
        return str(part["refusal"])
    if kind != "text":
        raise _refusal(f"{where} is of type {shown(kind)}; this model takes text only", where)
    if not isinstance(part.get("text"), str) or not part.keys() <= _PART_FIELDS:
        raise _refusal(f'{where} must be {{"type": "text", "text": "…"}}', where)
    return str(part["text"])


def _refusal(message: str, where: str) -> RequestError:
    return RequestError(message, param=where)
