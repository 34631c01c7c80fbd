"""Reads the items of a request's `input` into the one form in which they are stored, listed and shown to the model.

Invariant: every item returned has an id and contains nothing that the model could not be shown. Other items are refused
by their place in the list.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tandem.core.errors import shown
from tandem.gateway.errors import RequestError
from tandem.gateway.openai.responses.ids import input_item_id, output_item_id

MAX_ID_CHARACTERS = 256
_ROLES = ("user", "assistant", "system", "developer")
_TEXTS = ("input_text", "output_text")
_NAMES = {"type", "id", "status"}
_FIELDS: Mapping[str, set[str]] = {
    "message": {*_NAMES, "role", "content", "phase"},
    "function_call": {*_NAMES, "call_id", "name", "arguments", "caller"},
    "function_call_output": {*_NAMES, "call_id", "output", "name", "caller"},
    "reasoning": {*_NAMES, "summary", "content", "encrypted_content"},
    "item_reference": {"type", "id"},
}

Item = dict[str, Any]


def read_items(given: str | Sequence[Mapping[str, Any]], response_id: str) -> list[Item]:
    """`input` as items; references stay unresolved, see `reference_of`.

    Raises:
        RequestError: naming the item that is not supported.
    """
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    return [_read(item, response_id, index) for index, item in enumerate(given)]


def reference_of(item: Mapping[str, Any]) -> str | None:
    """The id of the item that this one refers to, if it is a reference; else None."""
    return str(item["id"]) if item["type"] == "item_reference" else None


def empty_message(response_id: str, index: int) -> Item:
    """A message of the assistant's that says nothing, as output item number `index`."""
    item_id = output_item_id("msg", response_id, index)
    part = {"type": _TEXTS[1], "text": "", "annotations": [], "logprobs": []}
    return {"id": item_id, "type": "message", "status": "incomplete", "role": "assistant", "content": [part]}


def renamed_copies(items: Sequence[Item], before: Sequence[Item], response_id: str) -> list[Item]:
    """`items`, where one whose id stands for an earlier item, or for one of `before`, gets an id of its own.

    NOTE: a client may send or refer to an item again, and pages of items continue behind an id.
    """
    known, named = {item["id"] for item in before}, []
    for index, item in enumerate(items):
        if item["id"] in known:
            prefix, _ = _READERS[item["type"]]
            item = {**item, "id": input_item_id(prefix, response_id, index)}
        known.add(item["id"])
        named.append(item)
    return named


def _read(item: Mapping[str, Any], response_id: str, index: int) -> Item:
    where = f"input[{index}]"
    kind = item.get("type") or ("message" if "role" in item else "item_reference" if item.keys() == {"id"} else None)
    if not isinstance(kind, str) or kind not in _FIELDS:
        raise _refusal(f"{where}.type={shown(kind)} is not supported by this server; it takes {', '.join(_FIELDS)}")
    for name, value in item.items():
        if name not in _FIELDS[kind] and value not in (None, False, []):
            raise _refusal(f"{where}.{shown(name)[1:-1]}={shown(value)} is not supported by this server; leave it out")
    prefix, reader = _READERS[kind]
    item_id = item.get("id")
    if item_id is not None and not (isinstance(item_id, str) and 0 < len(item_id) <= MAX_ID_CHARACTERS):
        raise _refusal(f"{where}.id={shown(item_id)} must be text of 1 to {MAX_ID_CHARACTERS} characters")
    read = reader(item, where)
    return {"id": item_id or input_item_id(prefix, response_id, index), "type": kind, **read}


def _message(item: Mapping[str, Any], where: str) -> Item:
    role, content = item.get("role"), item.get("content")
    if role not in _ROLES:
        raise _refusal(f"{where}.role={shown(role)} must be one of {', '.join(_ROLES)}")
    parts: Any = [{"type": _TEXTS[0], "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list) or not parts:
        raise _refusal(f"{where}.content={shown(content)} must be text or a list of text parts")
    read = [_part(part, role == "assistant", f"{where}.content[{number}]") for number, part in enumerate(parts)]
    return {"status": "completed", "role": role, "content": read}


def _part(part: Any, is_output: bool, where: str) -> Item:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "refusal" and is_output and isinstance(part.get("refusal"), str):
        return {"type": "refusal", "refusal": part["refusal"]}
    if kind not in _TEXTS:
        raise _refusal(f"{where} is of type {shown(kind)}; this model takes text only")
    if not isinstance(part.get("text"), str):
        raise _refusal(f"{where}.text={shown(part.get('text'))} must be text")
    unknown = part.keys() - {"type", "text", "annotations", "logprobs", "prompt_cache_breakpoint"}
    if unknown:
        raise _refusal(f"{where} has no {shown(min(map(str, unknown)))}")
    read: Item = {"type": "input_text", "text": part["text"]}
    if is_output:
        read = {"type": "output_text", "text": part["text"], "annotations": [], "logprobs": []}
    point = part.get("prompt_cache_breakpoint")
    if point is None:
        return read
    if not isinstance(point, Mapping) or not all(value is None or isinstance(value, str) for value in point.values()):
        wanted = '{"mode": "explicit"}, with a ttl or not'
        raise _refusal(f"{where}.prompt_cache_breakpoint={shown(point)} must be {wanted}")
    return read | {"prompt_cache_breakpoint": dict(point)}


def _call(item: Mapping[str, Any], where: str) -> Item:
    return {"status": "completed", **{name: _text(item, name, where) for name in ("call_id", "name", "arguments")}}


def _call_output(item: Mapping[str, Any], where: str) -> Item:
    output = item.get("output")
    if isinstance(output, list):
        output = [_part(part, False, f"{where}.output[{number}]") for number, part in enumerate(output)]
    elif not isinstance(output, str):
        raise _refusal(f"{where}.output={shown(output)} must be text or a list of text parts")
    return {"status": "completed", "call_id": _text(item, "call_id", where), "output": output}


def _reasoning(item: Mapping[str, Any], where: str) -> Item:
    """NOTE: thinking encrypted by another server is refused, since it cannot be shown; our own items contain text."""
    if item.get("encrypted_content"):
        raise _refusal(f"{where}.encrypted_content is not of this server's making; leave the item out")
    content = item.get("content") or []
    if not isinstance(content, list):
        raise _refusal(f"{where}.content={shown(content)} must be a list of reasoning_text parts")
    for number, part in enumerate(content):
        is_text = isinstance(part, Mapping) and part.get("type") == "reasoning_text"
        if not is_text or not isinstance(part.get("text"), str):
            raise _refusal(f"{where}.content[{number}]={shown(part)} must be a reasoning_text part")
    texts = [{"type": "reasoning_text", "text": part["text"]} for part in content]
    return {"status": "completed", "summary": [], "content": texts}


def _reference(item: Mapping[str, Any], where: str) -> Item:
    return {"id": _text(item, "id", where)}


def _text(item: Mapping[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise _refusal(f"{where}.{name}={shown(value)} must be text")
    return value


def _refusal(message: str) -> RequestError:
    return RequestError(message, param="input")


_READERS: Mapping[str, tuple[str, Callable[[Mapping[str, Any], str], Item]]] = {
    "message": ("msg", _message),
    "function_call": ("fc", _call),
    "function_call_output": ("fco", _call_output),
    "reasoning": ("rs", _reasoning),
    "item_reference": ("ref", _reference),
}
