"""Messages as a chat template sees them outside its main loop, with a record of what it looks at.

Invariant: whatever depends on a member of a message that is not recorded raises `NotResumableError`, or marks the
record as broken where the template could not be stopped. So a rendering with recorded members in place of messages
equals one with the messages.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

MAX_SEEN_BYTES = 64 * 1024  # of members that a template looks at, of all messages
_FIELDS_BYTES = 400  # measured: an object with its dictionary of one or two members
_SHORT = 32  # characters of a text that messages are likely to share, as a role

Message = Mapping[str, Any]


class NotResumableError(Exception):
    """A conversation cannot be rendered from a later message on; says why."""


class _Mark:
    """A value that stands for what was not looked at."""


_ABSENT, _PRESENT = _Mark(), _Mark()


class SeenFields:
    """Members of one message that a template looked at: their values, or whether they are there."""

    __slots__ = ("num_bytes", "values")

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values
        self.num_bytes = _FIELDS_BYTES + sum(_size(value) for value in values.values())


class SeenMessages:
    """The messages of one rendering. `shown`: what the template sees in place of the list of messages.

    Args:
        messages: None for those that are not read.
        recorded: of an earlier rendering, for the messages that are not read.
    """

    def __init__(self, messages: Sequence[Message | None], recorded: Sequence[SeenFields | None] = ()) -> None:
        self._messages = messages
        self._recorded = recorded
        self._seen: list[dict[str, Any] | SeenFields | None] = [None] * len(messages)
        self.is_broken = False
        self.shown = [SeenMessage(self, number) for number in range(len(messages))]

    def record(self) -> tuple[SeenFields | None, ...]:
        """Fields that were looked at, by message. Raises NotResumableError if they are too many to be kept."""
        same: dict[tuple[Any, ...], SeenFields] = {}
        found: list[SeenFields | None] = []
        num_bytes = 0
        for seen in self._seen:
            if not isinstance(seen, dict):
                found.append(seen)
                continue
            key = tuple(seen.items()) if _is_short(seen) else None
            fields = None if key is None else same.get(key)
            if fields is None:
                fields = SeenFields(seen)
                num_bytes += fields.num_bytes
                if key is not None:
                    same[key] = fields
            found.append(fields)
        if num_bytes > MAX_SEEN_BYTES:
            raise NotResumableError("the template looks at more than is kept of earlier messages")
        return tuple(found)

    def has(self, number: int, name: str) -> bool:
        message = self._messages[number]
        if message is None:
            return self._recalled(number, name) is not _ABSENT
        self._note(number).setdefault(name, _PRESENT if name in message else _ABSENT)
        return name in message

    def read(self, number: int, name: str) -> Any:
        """The member, or `ABSENT`."""
        message = self._messages[number]
        if message is None:
            value = self._recalled(number, name)
            if value is _PRESENT:
                raise NotResumableError("the template looks at a member that was not kept")
            return value
        value = message.get(name, _ABSENT)
        self._note(number)[name] = value
        return value

    def give_up(self) -> NoReturn:
        self.is_broken = True
        raise NotResumableError("the template takes whole messages outside its loop over them")

    def _note(self, number: int) -> dict[str, Any]:
        seen = self._seen[number]
        if not isinstance(seen, dict):
            seen = self._seen[number] = {}
        return seen

    def _recalled(self, number: int, name: str) -> Any:
        fields = self._recorded[number] if number < len(self._recorded) else None
        if fields is None or name not in fields.values:
            raise NotResumableError("the template looks at an earlier message that was not kept")
        self._seen[number] = fields
        return fields.values[name]


ABSENT = _ABSENT


@Mapping.register
class SeenMessage:
    """One message. Jinja's sandbox asks `member` and `get_member` for `message.name` and `message['name']`."""

    __slots__ = ("_messages", "_number")

    def __init__(self, messages: SeenMessages, number: int) -> None:
        self._messages = messages
        self._number = number

    def __getitem__(self, name: Any) -> Any:
        if not isinstance(name, str):
            self._messages.give_up()
        value = self._messages.read(self._number, name)
        if value is _ABSENT:
            raise KeyError(name)
        return value

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._messages.has(self._number, name)

    def get(self, name: str, default: Any = None) -> Any:
        value = self._messages.read(self._number, name)
        return default if value is _ABSENT else value

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> int:
        self._messages.give_up()

    def __iter__(self) -> Iterator[Any]:
        self._messages.give_up()

    def __eq__(self, other: object) -> bool:
        self._messages.give_up()

    def __hash__(self) -> int:
        self._messages.give_up()

    def __str__(self) -> str:
        self._messages.give_up()

    __repr__ = __str__


def number_of(message: "SeenMessage") -> int:
    """Its place in the conversation."""
    return message._number


def give_up(message: "SeenMessage") -> NoReturn:
    """Raises NotResumableError, for what a template does with a whole message."""
    message._messages.give_up()


def _is_short(seen: Mapping[str, Any]) -> bool:
    return all(
        value is None or isinstance(value, _Mark) or (type(value) is str and len(value) <= _SHORT)
        for value in seen.values()
    )


def _size(value: Any) -> int:
    if isinstance(value, str):
        return 4 * len(value) if not value.isascii() else len(value)
    return 0 if value is None or isinstance(value, _Mark) else 4 * len(repr(value))
