"""State of a chat template at the beginning of a message, so that a later rendering may resume there.

A template qualifies (see `resumable`) if the text that its loop writes for earlier messages depends only on them and on
the values in `LoopInputs`. A rendering is resumed if the new inputs agree with the former ones: the skipped messages
would be written as before. Values that the loop carries from one message to the next are set to those of the former
rendering.
"""

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jinja2.runtime import Undefined
from jinja2.utils import Namespace

from tandem.text.seen_messages import Message, NotResumableError, SeenFields, SeenMessage, SeenMessages, number_of

_MAX_CARRIED = 4096  # characters of a text that is carried from one message to the next
_MAX_DEPTH = 16
_SEEN_BYTES = 8  # a pointer for each message
_FIXED_BYTES = 1024
# Marks before the loop, the first message and message `next_start`; NOTE: random, and removed from every prompt.
_MARKS = tuple(secrets.token_hex(16) for _ in range(3))

Attribute = tuple[str, str]  # a namespace and one of its members


@dataclass(frozen=True, slots=True)
class LoopInputs:
    """Values besides the messages on which the text written by the loop over the messages depends.

    Args:
        prologue: digest of the text before the loop.
        offset: number of messages at the beginning that the loop leaves out.
        values: variables by name, as Python writes their values.
        index_bounds: integers that the loop only compares with the number of a message.
    """

    prologue: bytes
    offset: int
    values: Mapping[str, str]
    index_bounds: Mapping[str, int]

    def admits(self, other: "LoopInputs", start: int) -> bool:
        """Whether the messages before number `start` are written the same under both inputs.

        NOTE: of two bounds that are no less than the number of each message before `start`, comparisons are equal.
        """
        if (self.prologue, self.offset, self.values) != (other.prologue, other.offset, other.values):
            return False
        least = start - self.offset
        return self.index_bounds.keys() == other.index_bounds.keys() and all(
            bound == other.index_bounds[name] or min(bound, other.index_bounds[name]) >= least
            for name, bound in self.index_bounds.items()
        )


class ChangedInputsError(NotResumableError):
    """The template would write earlier messages differently than before. `inputs`: those of the new conversation."""

    def __init__(self, inputs: LoopInputs) -> None:
        super().__init__("the template writes earlier messages otherwise than before")
        self.inputs = inputs


@dataclass(frozen=True, slots=True)
class Resumption:
    """State of a rendering, from which a later one can begin at one of its messages.

    Args:
        inputs: values on which the text of earlier messages depends.
        carried: values that the loop carries to the message, by namespace and member.
        seen: members of messages that the template read outside its loop.
    """

    inputs: LoopInputs
    carried: Mapping[Attribute, Any]
    seen: Sequence[SeenFields | None]
    num_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        distinct = {id(fields): fields.num_bytes for fields in self.seen if fields is not None}
        texts = sum(len(name) + len(value) for name, value in self.inputs.values.items())
        own = texts + _SEEN_BYTES * len(self.seen) + _FIXED_BYTES
        object.__setattr__(self, "num_bytes", own + sum(distinct.values()))


class PartialRendering:
    """One rendering from message number `start` on; the rewritten template calls its methods in the loop over the
    messages.

    Args:
        messages: None for those that were not parsed.
        next_start: number of the message at which a later rendering is to begin; not before `start`.
        former: state of the rendering that is resumed; None: the whole is rendered.
    """

    def __init__(
        self, messages: Sequence[Message | None], start: int, next_start: int, former: Resumption | None
    ) -> None:
        assert start <= next_start < len(messages), "a later rendering begins at a message that is rendered"
        self._messages = messages
        self._start = start
        self._next_start = next_start
        self._former = former
        self._seen = SeenMessages(messages, () if former is None else former.seen)
        self._offset: int | None = None
        self._values: dict[str, str] = {}
        self._index_bounds: dict[str, int] = {}
        self._namespaces: Mapping[str, Any] = {}
        self._carries: Sequence[Attribute] = ()
        self._carried: dict[Attribute, Any] | None = None
        self.inner = InnerMessages(())

    @property
    def shown(self) -> Sequence[Any]:
        """The messages as the template sees them outside its loop."""
        return self._seen.shown

    def begin(
        self,
        items: Any,
        variables: Mapping[str, Any],
        namespaces: Mapping[str, Any],
        index_bounds: Sequence[str],
        carries: Sequence[Attribute],
    ) -> str:
        """Called before the loop over `items`; returns a mark to be written there.

        Args:
            variables: variables that the loop reads.
            namespaces: namespaces that it reads or changes.
            index_bounds: names, as `variable` or `namespace.member`, of values that are only compared with a
                message's number.
            carries: members of namespaces that it changes.
        """
        if self._offset is not None or not isinstance(items, list) or not items:
            raise NotResumableError("the template's loop goes over something else than the messages")
        self._offset = offset = len(self._messages) - len(items)
        if any(type(item) is not SeenMessage or number_of(item) != offset + n for n, item in enumerate(items)):
            raise NotResumableError("the template's loop goes over something else than the messages")
        if offset > self._start > 0 or offset > self._next_start:
            raise NotResumableError("the template's loop does not come to the message")
        self.inner = InnerMessages(self._messages[offset:])
        self._namespaces, self._carries = namespaces, carries
        for name, value in self._read_values(variables, namespaces):
            if name in index_bounds and type(value) is int:
                self._index_bounds[name] = value
            else:
                self._values[name] = _written(value)
        if self._former is not None:
            for (name, member), value in self._former.carried.items():
                if not isinstance(namespaces[name], Namespace):
                    raise NotResumableError("the template lacks a namespace that it had")
                namespaces[name][member] = value
        return _MARKS[0]

    def is_shown(self, index: int) -> bool:
        """Whether the message at this index of the loop is rendered rather than skipped."""
        assert self._offset is not None
        return index + self._offset >= self._start

    def enter(self, index: int) -> str:
        """Called at the beginning of a message, with its index in the loop; returns the marks to be written there."""
        assert self._offset is not None
        number = index + self._offset
        first = _MARKS[1] if number == max(self._start, self._offset) else ""
        if number != self._next_start:
            return first
        self._carried = {}
        for name, member in self._carries:
            members = _members(self._namespaces[name])
            if member in members:
                self._carried[name, member] = _carried(members[member])
        return first + _MARKS[2]

    def parts(self, text: str) -> tuple[str, str]:
        """Splits the rendered text, from `start` on, into the texts before message `next_start` and from it on.

        Raises:
            ChangedInputsError: earlier messages would be written otherwise than before.
            NotResumableError: the template took another way than expected.
        """
        if self._seen.is_broken:
            raise NotResumableError("the template takes whole messages outside its loop over them")
        prologue, first, rest = text.partition(_MARKS[0])
        skipped, second, rest = rest.partition(_MARKS[1])
        before, third, after = rest.partition(_MARKS[2])
        if not (first and second and third) or skipped or self._offset is None:
            raise NotResumableError("the template does not come to its loop over the messages")
        self._inputs = LoopInputs(_digest(prologue), self._offset, self._values, self._index_bounds)
        if self._former is None:
            return prologue + before, after
        if not self._former.inputs.admits(self._inputs, self._start):
            raise ChangedInputsError(self._inputs)
        return before, after

    def resumption(self) -> Resumption:
        """The state at message `next_start`; call after `parts`. Raises NotResumableError if it needs much memory."""
        assert self._carried is not None
        return Resumption(self._inputs, self._carried, self._seen.record())

    def _read_values(self, variables: Mapping[str, Any], namespaces: Mapping[str, Any]) -> list[tuple[str, Any]]:
        found = list(variables.items())
        for name, value in namespaces.items():
            if isinstance(value, Namespace):
                found += [(f"{name}.{member}", each) for member, each in _members(value).items()]
            else:
                found.append((name, value))
        return found


class InnerMessages(list[Any]):
    """The messages as the loop's body may index them; an index before the first, or of one not parsed, is an error."""

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, int) or index < 0:
            raise NotResumableError("the template asks for the message before the first, which is the last one")
        message = super().__getitem__(index)
        if message is None:
            raise NotResumableError("the template asks for an earlier message that was not read")
        return message


def _members(namespace: Any) -> Mapping[str, Any]:
    """Members of a namespace. NOTE: they have no public access as a whole, hence the mangled name."""
    return getattr(namespace, "_Namespace__attrs") if isinstance(namespace, Namespace) else {}  # noqa: B009


def _written(value: Any) -> str:
    """A value as Python writes it, or the digest of a long one; equal texts mean equal values.

    NOTE: 1, 1.0 and true are equal, and written differently by a template as well as here.
    """
    if isinstance(value, Undefined):
        return "undefined"
    _check_plain(value)
    written = repr(value)
    return written if len(written) <= 64 else _digest(written).hex()


def _check_plain(value: Any, depth: int = 0) -> None:
    if value is None or type(value) in (bool, int, float, str):
        return
    if depth < _MAX_DEPTH and type(value) in (list, tuple):
        for each in value:
            _check_plain(each, depth + 1)
    elif depth < _MAX_DEPTH and type(value) is dict:
        for name, each in value.items():
            _check_plain(name, depth + 1)
            _check_plain(each, depth + 1)
    else:
        raise NotResumableError("the template's loop reads a variable that is no plain value")


def _carried(value: Any) -> Any:
    if value is None or type(value) in (bool, int, float) or (type(value) is str and len(value) <= _MAX_CARRIED):
        return value
    raise NotResumableError("the template carries more than a short value from one message to the next")


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
