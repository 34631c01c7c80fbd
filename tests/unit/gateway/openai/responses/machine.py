"""State machine of this API's streams, written down a second time: each event's place, and what it adds up to."""

from collections.abc import Mapping, Sequence
from typing import Any

LAST = {"response.completed": "completed", "response.incomplete": "incomplete", "response.failed": "failed"}
_DELTAS = {"message": "response.output_text", "reasoning": "response.reasoning_text"}


def check_stream(events: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Asserts the order and the sums; returns the last response."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    created, progress, *middle, last = events
    assert (created["type"], progress["type"]) == ("response.created", "response.in_progress")
    assert created["response"]["output"] == progress["response"]["output"] == []
    assert created["response"]["status"] == "in_progress"
    assert last["response"]["status"] == LAST[last["type"]]
    assert len({event["response"]["id"] for event in (created, progress, last)}) == 1
    fixed = set(created["response"]) - {"status", "output", "usage", "error", "incomplete_details", "completed_at"}
    assert all(created["response"][name] == last["response"][name] for name in fixed - {"store"})
    queue = list(middle)
    items: list[Mapping[str, Any]] = []
    while queue and queue[0]["type"] == "response.output_item.added":
        item = _item(queue, len(items), is_cut=last["type"] == "response.failed")
        if item is not None:
            items.append(item)
    if last["type"] == "response.failed":
        assert queue.pop(0)["type"] == "error"
        assert last["response"]["output"][: len(items)] == items
    else:
        assert last["response"]["output"] == items
        assert last["response"]["usage"]["total_tokens"] > 0
    assert not queue, queue[0]["type"]
    return last["response"]  # type: ignore[no-any-return]


def _item(queue: list[Mapping[str, Any]], index: int, *, is_cut: bool) -> Mapping[str, Any] | None:
    """One item's events, off the queue; nothing if it was cut off."""
    added = queue.pop(0)
    item = added["item"]
    assert (added["output_index"], item["status"]) == (index, "in_progress")
    where = (item["id"], index)
    if item["type"] == "function_call":
        assert item["arguments"] == ""
        text = _deltas(queue, "response.function_call_arguments", where)
        if is_cut and queue[0]["type"] == "error":
            return None
        done = queue.pop(0)
        assert (done["type"], done["arguments"], done["name"]) == (
            "response.function_call_arguments.done",
            text,
            item["name"],
        )
        whole = {**item, "arguments": text}
    else:
        text_or_cut = _content(queue, _DELTAS[item["type"]], where, is_cut)
        if text_or_cut is None:
            return None
        assert item["content"] == []
        whole = {**item, "content": [text_or_cut]}
    ended = queue.pop(0)
    assert (ended["type"], ended["output_index"]) == ("response.output_item.done", index)
    assert {**ended["item"], "status": ""} == {**whole, "status": ""}
    assert ended["item"]["status"] in ("completed", "incomplete")
    return ended["item"]  # type: ignore[no-any-return]


def _content(
    queue: list[Mapping[str, Any]], kind: str, where: tuple[str, int], is_cut: bool
) -> Mapping[str, Any] | None:
    added = queue.pop(0)
    assert (added["type"], added["content_index"]) == ("response.content_part.added", 0)
    assert (added["item_id"], added["output_index"]) == where
    assert added["part"]["text"] == ""
    text = _deltas(queue, kind, where)
    if is_cut and queue[0]["type"] == "error":
        return None
    done, ended = queue.pop(0), queue.pop(0)
    assert (done["type"], done["text"], ended["type"]) == (f"{kind}.done", text, "response.content_part.done")
    assert (done["item_id"], done["content_index"], ended["content_index"]) == (where[0], 0, 0)
    assert ended["part"]["text"] == text
    return ended["part"]  # type: ignore[no-any-return]


def _deltas(queue: list[Mapping[str, Any]], kind: str, where: tuple[str, int]) -> str:
    text = ""
    while queue and queue[0]["type"] == f"{kind}.delta":
        event = queue.pop(0)
        assert (event["item_id"], event["output_index"]) == where
        assert event["delta"] or event.get("logprobs")
        text += event["delta"]
    return text
