"""Typed reading of one JSON object from a checkpoint, such as its `config.json`, with errors instead of guesses.

A missing key or an invalid value raises `CorruptCheckpointError`, which names the key, the value found and the accepted
values. `unread` lists the keys that nobody has read; the caller decides whether they matter. Nothing here knows what
any key means.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeGuard

from tandem.core.errors import CorruptCheckpointError, UnsupportedCheckpointError

REQUIRED: Final = -1  # as a default: the key must be present
MAX_COUNT: Final = 1 << 24  # largest integer accepted, if no other is given


def read_json_object(path: Path) -> dict[str, object]:
    """The object in `path`.

    Raises:
        CorruptCheckpointError: the file is missing, unreadable, not JSON, or not an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"{path} cannot be read as JSON ({error}); download it again") from error
    if not isinstance(value, dict):
        raise CorruptCheckpointError(f"{path} holds a {type(value).__name__}, a JSON object is expected")
    return value


class Fields:
    """The keys and values of one JSON object; records which keys were read.

    Args:
        values: the object.
        where: its name in messages, e.g. `config.json`.
    """

    def __init__(self, values: Mapping[str, object], where: str) -> None:
        self.where = where
        self._values = values
        self._asked: set[str] = set()
        self._names: Mapping[str, str] = {}  # in the file, by the name that is asked for

    def renamed(self, names: Mapping[str, str]) -> "Fields":
        """The same object, readable under other names: `names` maps keys of the file to the names that the calling code
        uses. Messages name the key of the file, and a key read from either object counts as read in both.

        Raises:
            CorruptCheckpointError: the file has a key under both names, with different values.
        """
        values = dict(self._values)
        given = {theirs: ours for theirs, ours in names.items() if theirs in values}
        for theirs, ours in given.items():
            value = values.pop(theirs)
            if values.setdefault(ours, value) != value:
                raise self.wrong(theirs, f"{ours}, which the file also has")
        found = Fields(values, self.where)
        self._asked.update(given)
        found._asked, found._names = self._asked, {ours: theirs for theirs, ours in given.items()}
        return found

    def completed(self, values: Mapping[str, object]) -> "Fields":
        """The same object with `values` added for the keys that it does not have."""
        return Fields({**values, **self._values}, self.where)

    def get(self, name: str) -> object:
        """The raw value, None when absent."""
        self._asked.add(name)
        return self._values.get(name)

    def has(self, name: str) -> bool:
        """Whether the key is present, even with the value null."""
        self._asked.add(name)
        return name in self._values

    def was_read(self, name: str) -> bool:
        """Whether some accessor has read the key."""
        return name in self._asked

    def count(self, name: str, default: int = REQUIRED, *, low: int = 1, high: int = MAX_COUNT) -> int:
        """An integer in [low, high]; `default` when the key is absent."""
        if name not in self._values and default != REQUIRED:
            return default
        value = self.optional_count(name, low=low, high=high)
        if value is None:
            raise self.wrong(name, f"an integer in [{low}, {high}]")
        return value

    def optional_count(
        self, name: str, default: int | None = None, *, low: int = 1, high: int = MAX_COUNT
    ) -> int | None:
        """As `count`, but null is a valid value; `default` only when the key is absent."""
        value = self.get(name)
        if value is None:
            return None if name in self._values else default
        if not _is_integer(value) or not low <= value <= high:
            raise self.wrong(name, f"an integer in [{low}, {high}]")
        return value

    def number(self, name: str, default: float, *, low: float = 0.0, high: float = 1e12) -> float:
        """A finite number in (low, high]; `default` when the key is absent or null."""
        value = self.optional_number(name, low=low, high=high)
        return default if value is None else value

    def optional_number(self, name: str, *, low: float = 0.0, high: float = 1e12) -> float | None:
        """A finite number in (low, high]; None when the key is absent or null."""
        value = self.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not low < value <= high:
            raise self.wrong(name, f"a number in ({low:g}, {high:g}]")
        return float(value)

    def numbers(self, name: str, default: Sequence[float]) -> tuple[float, ...]:
        """A list of numbers above 0, as long as `default`; `default` when the key is absent or null."""
        return tuple(default) if self.get(name) is None else self.listed_numbers(name, len(default))

    def listed_numbers(self, name: str, count: int) -> tuple[float, ...]:
        """A list of `count` numbers above 0."""
        value = self.get(name)
        if not isinstance(value, list) or len(value) != count or not all(map(_is_positive, value)):
            raise self.wrong(name, f"a list of {count} numbers above 0")
        return tuple(map(float, value))

    def flag(self, name: str, default: bool) -> bool:
        """A boolean; `default` when the key is absent. NOTE: null is false to transformers, and refused if the default
        is true.
        """
        value = self.get(name)
        if value is None and not (default and name in self._values):
            return default
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str | None:
        """A string; `default` when the key is absent or null."""
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.wrong(name, "a string")
        return value

    def texts(self, name: str) -> tuple[str, ...] | None:
        """A list of strings, or None when absent or null."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.wrong(name, "a list of strings")
        return tuple(value)

    def check_length(self, name: str, num_layers: int) -> None:
        """Refuses a list that does not have one item per layer. Does not count as reading the key."""
        value = self._values.get(name)
        if isinstance(value, list) and len(value) != num_layers:
            raise CorruptCheckpointError(
                f"{self.where}: {self._names.get(name, name)} must be a list of num_hidden_layers={num_layers} "
                f"entries, one a layer, found {len(value)}; correct the list or num_hidden_layers"
            )

    def indices(self, name: str, count: int) -> tuple[int, ...]:
        """A list of integers in [0, count); empty when absent or null."""
        value = self.get(name)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(_is_integer(item) and 0 <= item < count for item in value):
            raise self.wrong(name, f"a list of integers in [0, {count - 1}]")
        return tuple(value)

    def token_ids(self, name: str) -> tuple[int, ...]:
        """One token id or a list of them; empty when absent or null."""
        value = self.get(name)
        if value is None:
            return ()
        ids = value if isinstance(value, list) else [value]
        if not all(_is_integer(item) and item >= 0 for item in ids):
            raise self.wrong(name, "a token id or a list of token ids")
        return tuple(ids)

    def section(self, name: str) -> "Fields | None":
        """A nested object, or None when absent, null or empty."""
        value = self.get(name)
        if value is None or value == {}:
            return None
        if not isinstance(value, dict):
            raise self.wrong(name, "an object")
        return Fields(value, f"{self.where}: {name}")

    def wrong(self, name: str, accepted: str) -> CorruptCheckpointError:
        """The error for an invalid value."""
        found = json.dumps(self._values[name])[:80] if name in self._values else "nothing"
        return CorruptCheckpointError(f"{self.where}: {self._names.get(name, name)} must be {accepted}, found {found}")

    def unsupported(self, name: str, supported: str) -> UnsupportedCheckpointError:
        """The error for a valid value that Tandem does not support."""
        found = json.dumps(self._values.get(name))[:80]
        shown = self._names.get(name, name)
        return UnsupportedCheckpointError(f"{self.where}: {shown}={found} is not served; supported: {supported}")

    def only(self, name: str, accepted: Sequence[object], supported: str) -> None:
        """Refuses any value outside `accepted`; an absent key and null pass."""
        value = self.get(name)
        if value is not None and value not in accepted:
            raise self.unsupported(name, supported)

    def unread(self, ignored: Collection[str] = ()) -> dict[str, object]:
        """Keys that were not read, are not in `ignored`, and have a value other than null."""
        return {
            name: value
            for name, value in self._values.items()
            if name not in self._asked and name not in ignored and value is not None
        }

    def refuse_unread(self, ignored: Collection[str] = ()) -> None:
        """Raises `UnsupportedCheckpointError` if there are keys in `unread`, and names them."""
        unknown = self.unread(ignored)
        if unknown:
            raise UnsupportedCheckpointError(
                f"{self.where}: {shown_items(unknown)}: unknown here, and may change the results; "
                "remove them if they are known to be without effect"
            )


def _is_positive(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, int | float) and 0 < value <= 1e12


def _is_integer(value: object) -> TypeGuard[int]:
    """NOTE: to Python, but not to JSON, true is an integer."""
    return isinstance(value, int) and not isinstance(value, bool)


def shown_items(values: Mapping[str, object]) -> str:
    """Keys and values as text for a message, in alphabetical order, long values cut."""
    return ", ".join(sorted(f"{name}={json.dumps(value)[:60]}" for name, value in values.items()))
