"""Wire conversions of protobuf fields other than messages: numbers, strings, packed lists, enums, and `oneof`s.

`derive` combines them to the conversions of classes.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from types import NoneType, UnionType
from typing import Any, Final, Union, get_args, get_origin

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor, OneofDescriptor
from google.protobuf.message import Message

from tandem.core.errors import InvalidRequestError, shown
from tandem.rpc.form import Names, finite, pack_hashes, pack_token_ids, unpack_hashes, unpack_token_ids

ABSENT: Final = object()  # stands for the absence of a value, since None is a value
_UNSIGNED = (FieldDescriptor.CPPTYPE_UINT32, FieldDescriptor.CPPTYPE_UINT64)
_KINDS: dict[int, type] = {
    FieldDescriptor.CPPTYPE_INT32: int,
    FieldDescriptor.CPPTYPE_INT64: int,
    FieldDescriptor.CPPTYPE_UINT32: int,
    FieldDescriptor.CPPTYPE_UINT64: int,
    FieldDescriptor.CPPTYPE_DOUBLE: float,
    FieldDescriptor.CPPTYPE_BOOL: bool,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldRule:
    """Properties of a field that neither its annotation nor its descriptor states.

    Args:
        check: called with the field's name and the received value, before conversion; returns the value or raises
            `InvalidRequestError`. Default for numbers: they must be finite.
        if_absent: value of a field that a message lacks; default: the default of the class's field.
        newer: value for an enum number that only a newer release knows; default: it is refused.
        keep: predicate on the entries of a list; others are skipped when it is read.
    """

    check: Callable[[str, Any], Any] | None = None
    if_absent: Any = ABSENT
    newer: Any = None
    keep: Callable[[Any], bool] | None = None


NO_RULE = FieldRule()


@dataclass(frozen=True, slots=True)
class FieldForm:
    """Conversion of one field: `put` converts a value to the argument of its message's constructor, `take` converts it
    back. None: the value is unchanged.
    """

    put: Callable[[Any], Any] | None = None
    take: Callable[[Any], Any] | None = None


AS_IT_IS = FieldForm()  # conversion that leaves a value unchanged


def misfit(annotation: object, place: str) -> TypeError:
    """Error for an annotation that contradicts the message's declaration."""
    return TypeError(f"{annotation} has no form as {place}: annotate it as what the .proto file says, or enter a form")


def kind_of(field: FieldDescriptor) -> type:
    """Python type of a scalar field."""
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return bytes if field.type == FieldDescriptor.TYPE_BYTES else str
    return _KINDS[field.cpp_type]


def without_none(annotation: Any) -> tuple[Any, bool]:
    """`X` of `X | None`, and whether None is allowed."""
    if get_origin(annotation) not in (Union, UnionType) or NoneType not in get_args(annotation):
        return annotation, False
    rest = tuple(part for part in get_args(annotation) if part is not NoneType)
    return (rest[0] if len(rest) == 1 else Union[rest]), True  # noqa: UP007 - made of a tuple


def entry_of(annotation: Any) -> Any:
    """`X` of `tuple[X, ...]` and of `Sequence[X]`; None for anything else."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is tuple and len(parts) == 2 and parts[1] is ...:
        return parts[0]
    return parts[0] if origin is Sequence else None


def oneofs_of(descriptor: Descriptor) -> Iterator[OneofDescriptor]:
    """The `oneof`s declared in the .proto file, without the implicit one of each `optional` field."""
    for oneof in descriptor.oneofs:
        if not oneof.name.startswith("_"):
            yield oneof


def scalar_form(annotation: Any, field: FieldDescriptor, rule: FieldRule) -> FieldForm:
    """Conversion of a single field that is no message."""
    name = field.name
    if field.enum_type is not None:
        words = _words(annotation, name, field.enum_type, rule.newer)
        return FieldForm(words.number, words.word)
    kind = kind_of(field)
    check = _bound(rule, kind, name)
    if kind is annotation:
        return FieldForm(None, check)
    if kind is not bytes:
        raise misfit(annotation, field.full_name)
    put, take = _in_bytes(annotation, field)
    return FieldForm(put, take if check is None else lambda data: take(check(data)))


def scalar_list_form(entry: Any, field: FieldDescriptor, rule: FieldRule) -> FieldForm:
    """Conversion of a list of numbers, strings or bytes."""
    name = field.name
    if field.enum_type is not None or kind_of(field) is not entry:
        raise misfit(f"list of {entry}", field.full_name)
    if rule.check is not None:
        check = rule.check
        return FieldForm(None, lambda values: tuple(check(name, values)))
    if entry is float:
        return FieldForm(None, lambda values: tuple(finite(name, value) for value in values))
    return FieldForm(None, tuple)


def scalar_map_form(name: str, kind: type) -> FieldForm:
    """Conversion of a mapping to numbers, strings or bytes."""
    if kind is not float:
        return FieldForm(None, dict)

    def take(entries: Mapping[Any, float]) -> dict[Any, float]:
        values = dict(entries)
        if not all(map(math.isfinite, values.values())):
            key = next(key for key, value in values.items() if not math.isfinite(value))
            finite(f"{name}[{shown(key)}]", values[key])
        return values

    return FieldForm(None, take)


def _bound(rule: FieldRule, kind: type, name: str) -> Callable[[Any], Any] | None:
    check = rule.check or (finite if kind is float else None)
    return None if check is None else partial(check, name)


def _in_bytes(annotation: Any, field: FieldDescriptor) -> tuple[Callable[[Any], bytes], Callable[[bytes], Any]]:
    """Conversion of values that are sent as bytes: long lists of token ids or hashes, and JSON objects."""
    name = field.name
    if annotation == tuple[int, ...]:
        return pack_token_ids, lambda data: tuple(unpack_token_ids(name, data))
    if annotation == Sequence[int]:  # NOTE: as it came, since a router looks at none of them
        return pack_token_ids, partial(unpack_token_ids, name)
    if entry_of(annotation) is bytes:
        return pack_hashes, partial(unpack_hashes, name)
    if annotation == Mapping[str, Any]:
        return _put_json, partial(_take_json, name)
    raise misfit(annotation, field.full_name)


def _put_json(values: Mapping[str, Any]) -> bytes:
    return json.dumps(dict(values), allow_nan=False).encode() if values else b""


def _take_json(field: str, data: bytes) -> dict[str, Any]:
    if not data:
        return {}
    try:
        values = json.loads(data, parse_float=_finite_number, parse_constant=_finite_number)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{field} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise InvalidRequestError(f"{field} is a JSON {type(values).__name__}; an object is needed")
    return values


def _finite_number(text: str) -> float:
    return finite("number", float(text))


def _words(annotation: Any, name: str, enum: EnumDescriptor, newer: Any) -> Names[Any, int]:
    """Enum numbers by name: `FINISH_REASON_STOP` is `FinishReason.STOP`, or "stop" where the annotation is `str`. Zero
    is None.
    """
    kind, may_be_none = without_none(annotation)
    prefix = enum.values_by_number[0].name.removesuffix("UNSPECIFIED")
    numbers = {value.name.removeprefix(prefix): value.number for value in enum.values if value.number}
    if kind is str:
        words: dict[Any, int] = {word.lower(): number for word, number in numbers.items()}
    elif isinstance(kind, type) and issubclass(kind, Enum) and kind.__members__.keys() == numbers.keys():
        words = {member: numbers[word] for word, member in kind.__members__.items()}
    else:
        raise misfit(annotation, f"{enum.full_name} of {sorted(numbers)}")
    return Names(name, ({None: 0} if may_be_none else {}) | words, newer=newer)


class OneofForm:
    """Conversion of a `oneof`: a value of one of several types, each in its own field, of which one is set.

    Args:
        annotation: the union of types; each has a field.
    """

    def __init__(self, oneof: OneofDescriptor, annotation: Any) -> None:
        self._name = oneof.name
        self._members = [(field.name, kind_of(field), field.cpp_type in _UNSIGNED) for field in oneof.fields]
        kinds = {annotation} if isinstance(annotation, type) else set(get_args(annotation))
        if kinds != {kind for _, kind, _ in self._members}:
            raise misfit(annotation, oneof.full_name)

    def put(self, value: object) -> dict[str, Any]:
        """Sets the first field that can hold the value, as arguments of the message's constructor; none for None.

        Raises:
            TypeError: no field can.
        """
        if value is None:
            return {}
        for name, kind, is_unsigned in self._members:
            if isinstance(value, kind) and not (is_unsigned and isinstance(value, int) and value < 0):
                return {name: value}
        raise TypeError(f"{self._name}={shown(value)} is none of {[kind.__name__ for _, kind, _ in self._members]}")

    def take(self, message: Message) -> Any:
        """The value of the field that is set; None if none is set, or only one that this release does not know."""
        name = message.WhichOneof(self._name)
        if name is None:
            return None
        value = getattr(message, name)
        return finite(self._name, value) if isinstance(value, float) else value
