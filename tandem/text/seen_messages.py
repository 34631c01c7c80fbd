"""Messages as a chat template sees them outside its main loop, with a record of the members that it reads.

A later rendering gets the recorded members in place of messages that were not parsed. Invariant: reading a member that
is not recorded raises `NotResumableError`, or marks the record as broken where the template could not be stopped. So a
rendering from records equals one from the messages themselves.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

MAX_SEEN_BYTES = 64 * 1024  # of recorded members of all messages
_FIELDS_BYTES = 400  # measured: an object with its dictionary of one or two members
_SHORT = 32  # characters; records of messages whose texts are at most as long, such as roles, are shared

Message = Mapping[str, Any]


class NotResumableError(Exception):
    """A conversation cannot be rendered from a later message on; the message says why."""


class _Mark:
    """Stands for a member whose value was not read: it was absent, or only its presence was checked."""


_ABSENT, _PRESENT = _Mark(), _Mark()


class SeenFields:
    """Members of one message that a template read: their values, or marks for absent and present ones."""

    __slots__ = ("num_bytes", "values")

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values
        self.num_bytes = _FIELDS_BYTES + sum(_size(value) for value in values.values())


class SeenMessages:
    """The messages of one rendering. `shown`: the objects that the template gets in place of the messages.

    Args:
        messages: None for those that were not parsed.
        recorded: members that an earlier rendering read, for the messages that were not parsed.
    """

    def __init__(self, messages: Sequence[Message | None], recorded: Sequence[SeenFields | None] = ()) -> None:
        self._messages = messages
        self._recorded = recorded
        self._seen: list[dict[str, Any] | SeenFields | None] = [None] * len(messages)
        self.is_broken = False
        self.shown = [SeenMessage(self, number) for number in range(len(messages))]

    def record(self) -> tuple[SeenFields | None, ...]:
        """Members that were read, by message. Raises NotResumableError if they take too much memory."""
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
        """Whether a message has this member; recorded."""
        message = self._messages[number]
        if message is None:
            return self._recalled(number, name) is not _ABSENT
        self._note(number).setdefault(name, _PRESENT if name in message else _ABSENT)
        return name in message

    def read(self, number: int, name: str) -> Any:
        """The value of a message's member, or `ABSENT`; recorded."""
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
        """Marks the record as broken and raises NotResumableError."""
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
    """One message as the template sees it. The sandbox reads members by `get`; any other use breaks the record."""

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
    """The message's index in the conversation."""
    return message._number


def give_up(message: "SeenMessage") -> NoReturn:
    """Marks the record as broken and raises NotResumableError, because the template uses a whole message."""
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
