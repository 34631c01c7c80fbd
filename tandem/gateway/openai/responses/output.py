"""Builds the output items of a response, and their events, from the parts of an answer while it grows.

Invariant: at most one item is open; each is added, filled and done before the next begins, and its events add up to its
final value. Streamed or not, the same parts produce the same items.
"""

from collections.abc import Sequence
from typing import Any

from tandem.gateway.openai.responses.ids import output_item_id
from tandem.gateway.parts import CallArguments, CallBegun, ContentText, Part, Thought

Event = tuple[str, dict[str, Any]]  # its type, and its fields but for those that every event has


class Output:
    """Output of one response. `items`: the items that are done."""

    def __init__(self, response_id: str) -> None:
        self._response_id = response_id
        self._open: _OpenItem | None = None
        self.items: list[dict[str, Any]] = []

    def add(self, part: Part, logprobs: Sequence[Any] = ()) -> list[Event]:
        """Adds a part and returns its events. `logprobs`: of a `ContentText`'s tokens, in this API's format."""
        if not (isinstance(part, CallBegun) or part.text or logprobs):
            return []
        match part:
            case ContentText():
                return self._more(_OpenText, part.text, logprobs)
            case Thought():
                return self._more(_OpenThought, part.text)
            case CallBegun():
                return self.close() + self._begin(_OpenCall(part))
            case CallArguments():
                assert isinstance(self._open, _OpenCall), "arguments follow the beginning of their call"
                return self._open.more(part.text)

    def add_missing_message(self) -> list[Event]:
        """Begins an empty message where there is no item, so that a conversation can go on after it.

        NOTE: without one the next question follows the last one, which templates of alternating roles refuse.
        """
        if self.items or self._open is not None:
            return []
        message = _OpenText()
        begun = self._begin(message)
        message.more("")
        return begun

    def add_logprobs(self, logprobs: Sequence[Any]) -> list[Event]:
        """Adds logprobs of tokens whose text was added before, or that have none."""
        return self._open.more("", logprobs) if logprobs and isinstance(self._open, _OpenText) else []

    def close(self, *, is_complete: bool = True) -> list[Event]:
        """Ends the open item, as completed or as cut off, and returns its events."""
        if self._open is None:
            return []
        status = "completed" if is_complete else "incomplete"
        events, item = self._open.end(status), self._open.value(status)
        events.append(("response.output_item.done", {"output_index": len(self.items), "item": item}))
        self.items.append(item)
        self._open = None
        return events

    @property
    def so_far(self) -> list[dict[str, Any]]:
        """The items that are done, and the open one as incomplete."""
        return self.items if self._open is None else [*self.items, self._open.value("incomplete")]

    def _more(self, kind: "type[_OpenText | _OpenThought]", text: str, logprobs: Sequence[Any] = ()) -> list[Event]:
        events: list[Event] = []
        if not isinstance(self._open, kind):
            events = self.close() + self._begin(kind())
        assert self._open is not None
        return events + self._open.more(text, logprobs)

    def _begin(self, item: "_OpenItem") -> list[Event]:
        item.place(output_item_id(item.prefix, self._response_id, len(self.items)), len(self.items))
        self._open = item
        added = {"output_index": len(self.items), "item": item.value("in_progress")}
        return [("response.output_item.added", added), *item.begin()]


class _OpenItem:
    """An item that is being written. `prefix`: beginning of its id; `events`: beginning of its events' names."""

    prefix: str
    events: str

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._id = ""
        self._where: dict[str, Any] = {}

    def place(self, item_id: str, index: int) -> None:
        self._id = item_id
        self._where = {"item_id": item_id, "output_index": index}

    def begin(self) -> list[Event]:
        return []

    def more(self, text: str, logprobs: Sequence[Any] = ()) -> list[Event]:
        self._texts.append(text)
        return [(f"{self.events}.delta", {**self._where, "delta": text})]

    def end(self, status: str) -> list[Event]:
        raise NotImplementedError

    def value(self, status: str) -> dict[str, Any]:
        """The item in its current state."""
        raise NotImplementedError

    @property
    def _text(self) -> str:
        return "".join(self._texts)


class _OpenText(_OpenItem):
    """A message item with text."""

    prefix = "msg"
    events = "response.output_text"

    def __init__(self) -> None:
        super().__init__()
        self._logprobs: list[Any] = []

    def begin(self) -> list[Event]:
        return [("response.content_part.added", {**self._where, "content_index": 0, "part": self._part()})]

    def more(self, text: str, logprobs: Sequence[Any] = ()) -> list[Event]:
        self._logprobs += logprobs
        ((kind, fields),) = super().more(text)
        return [(kind, {**fields, "content_index": 0, "logprobs": list(logprobs)})]

    def end(self, status: str) -> list[Event]:
        where = {**self._where, "content_index": 0}
        return [
            ("response.output_text.done", {**where, "text": self._text, "logprobs": self._logprobs}),
            ("response.content_part.done", {**where, "part": self._part()}),
        ]

    def value(self, status: str) -> dict[str, Any]:
        content = [self._part()] if self._texts else []
        return {"id": self._id, "type": "message", "status": status, "role": "assistant", "content": content}

    def _part(self) -> dict[str, Any]:
        return {"type": "output_text", "text": self._text, "annotations": [], "logprobs": list(self._logprobs)}


class _OpenThought(_OpenItem):
    """A reasoning item."""

    prefix = "rs"
    events = "response.reasoning_text"

    def begin(self) -> list[Event]:
        return [("response.content_part.added", {**self._where, "content_index": 0, "part": self._part()})]

    def more(self, text: str, logprobs: Sequence[Any] = ()) -> list[Event]:
        ((kind, fields),) = super().more(text)
        return [(kind, {**fields, "content_index": 0})]

    def end(self, status: str) -> list[Event]:
        where = {**self._where, "content_index": 0}
        return [
            ("response.reasoning_text.done", {**where, "text": self._text}),
            ("response.content_part.done", {**where, "part": self._part()}),
        ]

    def value(self, status: str) -> dict[str, Any]:
        content = [self._part()] if self._texts else []
        return {"id": self._id, "type": "reasoning", "status": status, "summary": [], "content": content}

    def _part(self) -> dict[str, Any]:
        return {"type": "reasoning_text", "text": self._text}


class _OpenCall(_OpenItem):
    """A function call item."""

    prefix = "fc"
    events = "response.function_call_arguments"

    def __init__(self, begun: CallBegun) -> None:
        super().__init__()
        self._begun = begun

    def end(self, status: str) -> list[Event]:
        fields = {**self._where, "name": self._begun.name, "arguments": self._text}
        return [("response.function_call_arguments.done", fields)]

    def value(self, status: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "function_call",
            "status": status,
            "call_id": self._begun.call_id,
            "name": self._begun.name,
            "arguments": self._text,
        }
