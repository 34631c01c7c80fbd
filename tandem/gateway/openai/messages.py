"""Chat messages as a text model's template can take them. Invariant: a part we cannot show the model is refused.

`developer` becomes `system`, which is what templates know; text parts are joined by line feeds.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from tandem.core.errors import shown
from tandem.gateway.errors import RequestError

ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant"}
_KNOWN = frozenset({"role", "content", "name", "refusal", "reasoning", "reasoning_content", "thinking"})
_HARMLESS_PART_FIELDS = frozenset({"type", "text", "prompt_cache_breakpoint", "cache_control"})


def read_messages(messages: Sequence[Mapping[str, Any]], max_messages: int) -> list[dict[str, Any]]:
    """Raises RequestError naming the message, and the part of it, that cannot be taken."""
    if not messages:
        raise RequestError("messages is empty; a chat needs at least one", param="messages")
    if len(messages) > max_messages:
        raise RequestError(f"messages has {len(messages)} entries; at most {max_messages} are taken", param="messages")
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    role = message.get("role")
    if role in ("tool", "function") or message.get("tool_calls") or message.get("function_call"):
        raise _refusal(f"{where}: tool calls are not supported by this server", where)
    if not isinstance(role, str) or role not in ROLES:
        raise _refusal(f"{where}.role={shown(role)} must be one of {', '.join(ROLES)}", where)
    unknown = [name for name, value in message.items() if name not in _KNOWN and value not in (None, [])]
    if unknown:
        raise _refusal(f"{where}.{shown(unknown[0])[1:-1]} is not supported by this server; leave it out", where)
    said = {name: value for name, value in message.items() if name in _KNOWN and value is not None}
    for name, value in said.items():
        if name != "content" and not isinstance(value, str):
            raise _refusal(f"{where}.{name}={shown(value)} must be text", where)
    return {**said, "role": ROLES[role], "content": _content(message.get("content"), role, where)}


def _content(content: Any, role: str, where: str) -> str:
    if isinstance(content, str):
        return content
    if content is None and role == "assistant":
        return ""
    if isinstance(content, list) and content:
        return "\n".join(_part(part, f"{where}.content[{index}]") for index, part in enumerate(content))
    raise _refusal(f"{where}.content={shown(content)} must be text or a list of text parts", where)


def _part(part: Any, where: str) -> str:
    if not isinstance(part, Mapping):
        raise _refusal(f"{where}={shown(part)} must be an object with a type", where)
    kind = part.get("type")
    if kind == "refusal" and isinstance(part.get("refusal"), str):
        return str(part["refusal"])
    if kind != "text":
        raise _refusal(f"{where} is of type {shown(kind)}; this model takes text only", where)
    if not isinstance(part.get("text"), str) or not part.keys() <= _HARMLESS_PART_FIELDS:
        raise _refusal(f'{where} must be {{"type": "text", "text": "…"}}', where)
    return str(part["text"])


def _refusal(message: str, where: str) -> RequestError:
    return RequestError(message, param=where)
