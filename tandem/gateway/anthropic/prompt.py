"""Anthropic's system and messages as a text model's template can take them.

Invariant: a part we cannot show the model is refused. Its own earlier thinking is left out, as Anthropic's API does.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from tandem.core.errors import shown
from tandem.gateway.anthropic.fields import MAX_BREAKPOINTS, CacheControl, PromptBody
from tandem.gateway.errors import RequestError

ROLES = ("user", "assistant", "system")
_THINKING = ("thinking", "redacted_thinking")
_TEXT_FIELDS = frozenset({"type", "text", "cache_control", "citations"})


def read_prompt(body: PromptBody, max_messages: int) -> list[dict[str, str]]:
    """The conversation, the system prompt first; texts of one message are joined by line feeds.

    Raises:
        RequestError: naming the message, and the part of it, that cannot be taken.
    """
    if not body.messages:
        raise _refusal("messages is empty; at least one is needed", "messages")
    if len(body.messages) > max_messages:
        raise _refusal(f"messages has {len(body.messages)} entries; at most {max_messages} are taken", "messages")
    _check_breakpoints(body)
    system = [] if body.system is None else [{"role": "system", "content": _text(body.system, "system")}]
    messages = [_message(message, f"messages.{index}") for index, message in enumerate(body.messages)]
    if messages[-1]["role"] == "assistant":
        raise _refusal("the last message is the assistant's: beginning its answer is not supported here", "messages")
    return [*system, *messages]


def _message(message: Mapping[str, Any], where: str) -> dict[str, str]:
    role = message.get("role")
    if role not in ROLES:
        raise _refusal(f"{where}.role={shown(role)} must be one of {', '.join(ROLES)}", where)
    unknown = message.keys() - {"role", "content"}
    if unknown:
        raise _refusal(f"{where}.{shown(min(unknown))[1:-1]} is not supported by this server; leave it out", where)
    return {"role": role, "content": _text(message.get("content"), f"{where}.content")}


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _refusal(f"{where}={shown(content)} must be text or a list of blocks", where)
    texts = (_block(block, f"{where}.{index}") for index, block in enumerate(content))
    return "\n".join(text for text in texts if text is not None)


def _block(block: Any, where: str) -> str | None:
    kind = block.get("type") if isinstance(block, Mapping) else None
    if kind in _THINKING:
        return None
    if kind in ("tool_use", "tool_result"):
        raise _refusal(f"{where}: tool calls are not supported by this server", where)
    if kind != "text":
        raise _refusal(f"{where} is of type {shown(kind)}; this model takes text only", where)
    if not isinstance(block.get("text"), str) or block.keys() - _TEXT_FIELDS or block.get("citations"):
        raise _refusal(f'{where} must be {{"type": "text", "text": "…"}}', where)
    return str(block["text"])


def _check_breakpoints(body: PromptBody) -> None:
    """Wrong ones are refused, though none changes the answer."""
    found = list(_breakpoints(body))
    for where, value in found:
        try:
            CacheControl.model_validate(value)
        except ValidationError as error:
            raise _refusal(
                f'{where}.cache_control={shown(value)} must be {{"type": "ephemeral", "ttl": "5m" or "1h"}}', where
            ) from error
    if len(found) > MAX_BREAKPOINTS:
        raise _refusal(
            f"cache_control is set on {len(found)} blocks; at most {MAX_BREAKPOINTS} are taken", found[-1][0]
        )


def _breakpoints(body: PromptBody) -> Iterator[tuple[str, Any]]:
    parts: list[tuple[str, Any]] = [("system", body.system)]
    parts += [(f"messages.{index}.content", message.get("content")) for index, message in enumerate(body.messages)]
    for where, content in parts:
        for index, block in enumerate(content if isinstance(content, list) else ()):
            if isinstance(block, Mapping) and block.get("cache_control") is not None:
                yield f"{where}.{index}", block["cache_control"]


def _refusal(message: str, where: str) -> RequestError:
    return RequestError(message, param=where)
