"""Reads the content blocks of Anthropic's messages into values.

Invariant: a block that the model cannot be shown is refused, naming its place in the body.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tandem.core.errors import shown
from tandem.gateway.anthropic.breakpoints import read_ttl_s
from tandem.gateway.anthropic.fields import refuse_unknown
from tandem.gateway.errors import RequestError
from tandem.gateway.limits import check_tool_name

MAX_BLOCKS = 4096  # of one message
MAX_ID_CHARACTERS = 256  # of a tool call's id
_ERROR = "Error: "  # before the result of a tool that failed


@dataclass(frozen=True, slots=True)
class CacheControl:
    """A `cache_control` on a block, which sets a cache breakpoint there. `where`: the block's path in the body."""

    ttl_s: float
    where: str


@dataclass(frozen=True, slots=True)
class TextBlock:
    """A block of text. `mark`: its cache breakpoint."""

    text: str
    mark: CacheControl | None = None


@dataclass(frozen=True, slots=True)
class ThinkingBlock:
    """Earlier thinking of the model; empty where it was redacted."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolUseBlock:
    """A tool call of the assistant. `where`: the block's path in the body; `mark`: its cache breakpoint."""

    call_id: str
    name: str
    arguments: Mapping[str, Any]
    where: str
    mark: CacheControl | None = None


@dataclass(frozen=True, slots=True)
class ToolResultBlock:
    """Result of a tool call. `marks`: breakpoints inside its text, each with the number of characters before it."""

    call_id: str
    text: str
    where: str
    marks: tuple[tuple[int, CacheControl], ...] = ()


Block = TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock


def read_blocks(content: Any, where: str, role: str) -> tuple[Block, ...]:
    """The blocks of a message of `role`; a plain string is one text block.

    Raises:
        RequestError: naming the block, and the part of it, that is not supported.
    """
    if isinstance(content, str):
        return (TextBlock(content),)
    if not isinstance(content, list):
        raise _refusal(f"{where}={shown(content)} must be text or a list of blocks", where)
    if len(content) > MAX_BLOCKS:
        raise _refusal(f"{where} has {len(content)} blocks; at most {MAX_BLOCKS} are taken", where)
    return tuple(_block(block, f"{where}.{index}", role) for index, block in enumerate(content))


def join_texts(blocks: Sequence[TextBlock]) -> tuple[str, tuple[tuple[int, CacheControl], ...]]:
    """The texts of `blocks` joined by line feeds, and their marks with the number of characters before each."""
    texts: list[str] = []
    marks: list[tuple[int, CacheControl]] = []
    num_characters = -1
    for block in blocks:
        texts.append(block.text)
        num_characters += 1 + len(block.text)
        if block.mark is not None:
            marks.append((num_characters, block.mark))
    return "\n".join(texts), tuple(marks)


def _block(block: Any, where: str, role: str) -> Block:
    kind = block.get("type") if isinstance(block, Mapping) else None
    known = _READERS[role]
    if not isinstance(kind, str) or kind not in known:
        takes = ", ".join(known)
        raise _refusal(f"{where} is of type {shown(kind)}; this model's {role} messages take {takes} only", where)
    return known[kind](block, where)


def _mark(block: Mapping[str, Any], where: str) -> CacheControl | None:
    ttl_s = read_ttl_s(block.get("cache_control"), where)
    return None if ttl_s is None else CacheControl(ttl_s, where)


def _text(block: Mapping[str, Any], where: str) -> TextBlock:
    text = block.get("text")
    if not isinstance(text, str):
        raise _refusal(f'{where} must be {{"type": "text", "text": "…"}}', where)
    if block.get("citations"):
        raise _refusal(
            f"{where}.citations={shown(block['citations'])} is not supported by this server; leave it out", where
        )
    refuse_unknown(block, frozenset({"type", "text", "cache_control", "citations"}), where)
    mark = _mark(block, where)
    if mark is not None and not text:
        raise _refusal(f"{where}.cache_control is on an empty text; put it on a block that says something", where)
    return TextBlock(text, mark)


def _thinking(block: Mapping[str, Any], where: str) -> ThinkingBlock:
    """NOTE: the signature is not checked; see `Signature`."""
    text = block.get("thinking")
    if not isinstance(text, str):
        raise _refusal(f"{where}.thinking={shown(text)} must be text", where)
    return ThinkingBlock(text)


def _redacted(block: Mapping[str, Any], where: str) -> ThinkingBlock:
    return ThinkingBlock("")


def _tool_use(block: Mapping[str, Any], where: str) -> ToolUseBlock:
    refuse_unknown(block, frozenset({"type", "id", "name", "input", "cache_control", "caller"}), where)
    if block.get("caller") not in (None, {"type": "direct"}):
        raise _refusal(f"{where}.caller={shown(block['caller'])}: this server runs no tools of its own", where)
    name = check_tool_name(block.get("name"), f"{where}.name")
    arguments = block.get("input")
    if not isinstance(arguments, Mapping):
        raise _refusal(f"{where}.input={shown(arguments)} must be an object", where)
    return ToolUseBlock(_id(block.get("id"), f"{where}.id"), name, arguments, where, _mark(block, where))


def _tool_result(block: Mapping[str, Any], where: str) -> ToolResultBlock:
    refuse_unknown(block, frozenset({"type", "tool_use_id", "content", "is_error", "cache_control"}), where)
    is_error, content = block.get("is_error"), block.get("content")
    if is_error not in (None, True, False):
        raise _refusal(f"{where}.is_error={shown(is_error)} must be true or false", where)
    inner = read_blocks("" if content is None else content, f"{where}.content", "tool_result")
    text, marks = join_texts([part for part in inner if isinstance(part, TextBlock)])
    before = _ERROR if is_error else ""
    text, marks = before + text, tuple((len(before) + offset, mark) for offset, mark in marks)
    own = _mark(block, where)
    if own is not None:
        marks += ((len(text), own),)
    return ToolResultBlock(_id(block.get("tool_use_id"), f"{where}.tool_use_id"), text, where, marks)


def _id(value: Any, where: str) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= MAX_ID_CHARACTERS:
        raise _refusal(f"{where}={shown(value)} must be text of 1 to {MAX_ID_CHARACTERS} characters", where)
    return value


def _refusal(message: str, where: str) -> RequestError:
    return RequestError(message, param=where)


_READERS: Mapping[str, Mapping[str, Callable[[Mapping[str, Any], str], Block]]] = {
    "user": {"text": _text, "tool_result": _tool_result},
    "assistant": {
        "text": _text,
        "thinking": _thinking,
        "redacted_thinking": _redacted,
        "tool_use": _tool_use,
    },
    "system": {"text": _text},
    "tool_result": {"text": _text},
}
