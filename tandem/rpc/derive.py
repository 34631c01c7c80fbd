"""Derives the wire conversion (`form.Form`) of a class from its annotations and its protobuf message's descriptor.

Invariant: every field of a class is a field, or a `oneof`, of its message and the other way round, and of a type that
can hold it. A mismatch is a TypeError at import, so that no field is left out or misread. Properties of a field that
neither declaration states (it may not be empty, the meaning of an unknown number) are given as its `FieldRule`.
"""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from tandem.core.errors import InvalidRequestError, shown
from tandem.rpc.form import Form
from tandem.rpc.kinds import (
    ABSENT,
    AS_IT_IS,
    NO_RULE,
    FieldForm,
    FieldRule,
    OneofForm,
    entry_of,
    kind_of,
    misfit,
    oneofs_of,
    scalar_form,
    scalar_list_form,
    scalar_map_form,
    without_none,
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """Conversion of one field of a class.

    Args:
        form: conversion of its value.
        may_be_none: None is allowed, and then nothing is sent.
        has_presence: the message may lack the field; `if_absent` is its value then, ABSENT = lacking it is an error.
        is_none_if_empty: an empty list is read as None, since the wire cannot tell an absent list from an empty one.
        oneof: the `oneof` that holds the value, if it is one.
    """

    form: FieldForm = AS_IT_IS
    may_be_none: bool = False
    has_presence: bool = False
    if_absent: Any = ABSENT
    is_none_if_empty: bool = False
    oneof: OneofForm | None = None


class Forms:
    """The forms (wire conversions) of a protocol's classes. Classes that occur in others are added before them."""

    def __init__(self) -> None:
        self._forms: dict[object, Form[Any]] = {}

    def add(self, value_type: type[T], message_type: type[Message], **rules: FieldRule) -> Form[T]:
        """Derives and registers the form of a dataclass or NamedTuple; fields of this type in other classes use it.

        Raises:
            TypeError: the two declarations contradict each other; the field is named.
        """
        hints, defaults = get_type_hints(value_type), _defaults(value_type)
        if unknown := rules.keys() - defaults.keys():
            raise TypeError(f"{value_type.__name__} has no field {sorted(unknown)}")
        declared = _declared(message_type)
        parts = {
            name: self._part(name, declared, hints[name], rules.get(name, NO_RULE), default)
            for name, default in defaults.items()
        }
        covered = set(parts)
        for oneof in oneofs_of(declared):
            members = {field.name for field in oneof.fields}
            covered |= members if covered & {*members, oneof.name} else set()
        if left_out := {field.name for field in declared.fields} - covered:
            raise TypeError(f"{value_type.__name__} has no field {sorted(left_out)}, which {declared.full_name} has")
        return self.enter(value_type, Form(message_type, *_whole(value_type, message_type, parts)))

    def enter(self, annotation: object, form: Form[T]) -> Form[T]:
        """Registers a hand-written form for every field with this annotation."""
        self._forms[annotation] = form
        return form

    def inside(self, annotation: Any, message_type: type[Message], rule: FieldRule = NO_RULE) -> Form[Any]:
        """Form of a value that is the only content of a message: its only field, or one field of its only `oneof`. An
        annotation of None stands for a message without fields.
        """
        declared = _declared(message_type)
        if annotation is None and not declared.fields:
            return Form(message_type, lambda _: message_type(), lambda _: None)
        oneofs = list(oneofs_of(declared))
        if len(oneofs) == 1 and len(oneofs[0].fields) == len(declared.fields):
            oneof = OneofForm(oneofs[0], annotation)
            return Form(message_type, lambda value: message_type(**oneof.put(value)), oneof.take)
        if len(declared.fields) != 1:
            raise misfit(annotation, declared.full_name)
        name = declared.fields[0].name
        part = self._part(name, declared, annotation, rule, ABSENT)
        return Form(
            message_type,
            _compiled("value", f"message_type({_sent(name, part, 'value')})", {name: part}, message_type=message_type),
            _compiled("message", _read(name, part), {name: part}, missing=_refusal_of_missing(declared.name)),
        )

    def _part(self, name: str, declared: Descriptor, annotation: Any, rule: FieldRule, default: Any) -> _Part:
        inner, is_optional = without_none(annotation)
        field = declared.fields_by_name.get(name)
        for oneof in oneofs_of(declared):
            if oneof.name == name or (field is not None and field.containing_oneof is oneof):
                return _Part(oneof=OneofForm(oneof, inner))
        if field is None:
            raise misfit(annotation, f"{declared.full_name}.{name}, which does not exist")
        if field.is_repeated:
            return _Part(form=self._many(inner, field, rule), may_be_none=is_optional, is_none_if_empty=is_optional)
        if field.enum_type is not None:
            return _Part(form=scalar_form(annotation, field, rule))
        form = self._single(inner, field, rule)
        if not field.has_presence:
            if is_optional:
                raise misfit(annotation, f"{field.full_name}, which is not optional")
            return _Part(form=form)
        if_absent = None if is_optional else default if rule.if_absent is ABSENT else rule.if_absent
        if if_absent is ABSENT and field.message_type is None:
            raise misfit(annotation, f"{field.full_name}, which is optional")
        return _Part(form=form, may_be_none=is_optional, has_presence=True, if_absent=if_absent)

    def _single(self, annotation: Any, field: FieldDescriptor, rule: FieldRule) -> FieldForm:
        """Form of a single value: a field, or an entry of a list or mapping."""
        if field.message_type is None:
            return scalar_form(annotation, field, rule)
        form = self._forms.get(annotation) or self.inside(annotation, GetMessageClass(field.message_type), rule)
        if form.message_type.DESCRIPTOR is not field.message_type:
            raise misfit(annotation, f"{field.full_name}, a {field.message_type.name}")
        return FieldForm(form.put, form.take)

    def _many(self, annotation: Any, field: FieldDescriptor, rule: FieldRule) -> FieldForm:
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            return self._mapping(annotation, field, rule)
        entry = entry_of(annotation)
        if entry is None:
            raise misfit(annotation, f"the list {field.full_name}")
        if field.message_type is None:
            return scalar_list_form(entry, field, rule)
        one = self._single(entry, field, NO_RULE)
        put, take, name, check, keep = one.put or _same, one.take or _same, field.name, rule.check, rule.keep

        def take_all(messages: Any) -> tuple[Any, ...]:
            if check is not None:
                check(name, messages)
            if keep is not None:
                messages = filter(keep, messages)
            return tuple([take(message) for message in messages])

        return FieldForm(lambda values: [put(value) for value in values], take_all)

    def _mapping(self, annotation: Any, field: FieldDescriptor, rule: FieldRule) -> FieldForm:
        assert field.message_type is not None, "a map's entry is a message"
        key, value = field.message_type.fields_by_name["key"], field.message_type.fields_by_name["value"]
        kinds = get_args(annotation)
        if get_origin(annotation) is not Mapping or kinds[0] is not kind_of(key):
            raise misfit(annotation, f"the map {field.full_name}")
        if value.message_type is None:
            if kind_of(value) is not kinds[1]:
                raise misfit(annotation, f"the map {field.full_name}")
            return scalar_map_form(field.name, kinds[1])
        one = self._single(kinds[1], value, rule)
        put, take = one.put or _same, one.take or _same

        def take_all(entries: Mapping[Any, Message]) -> dict[Any, Any]:
            """NOTE: a value of a kind that only newer releases know looks as if there were none, and is left out."""
            taken = {key: take(entry) for key, entry in entries.items()}
            return {key: one for key, one in taken.items() if one is not None}

        return FieldForm(lambda values: {key: put(one) for key, one in values.items()}, take_all)


def _declared(message_type: type[Message]) -> Descriptor:
    """The descriptor of a message class. NOTE: the stubs also name a class of the implementation, hence the cast."""
    return cast(Descriptor, message_type.DESCRIPTOR)


def _same(value: Any) -> Any:
    return value


def _defaults(value_type: Any) -> dict[str, Any]:
    """The class's fields, each with its default or ABSENT."""
    if issubclass(value_type, tuple):
        return {name: value_type._field_defaults.get(name, ABSENT) for name in value_type._fields}
    return {field.name: ABSENT if field.default is MISSING else field.default for field in fields(value_type)}


def _whole(value_type: type[T], message_type: type[Message], parts: Mapping[str, _Part]) -> tuple[Any, Any]:
    """Builds the functions `put` and `take` of a class."""
    sent = ", ".join(_sent(name, part, f"value.{name}") for name, part in parts.items())
    build = _compiled("value", f"message_type({sent})", parts, message_type=message_type)

    def put(value: T) -> Message:
        try:
            return cast(Message, build(value))
        except (ValueError, TypeError, OverflowError) as error:
            raise _unsendable(value, message_type, parts, error) from error

    by_name = {name: _read(name, part) for name, part in parts.items()}
    is_tuple = issubclass(value_type, tuple)  # NOTE: which is made faster of what is in order
    read = ", ".join(one if is_tuple else f"{name}={one}" for name, one in by_name.items())
    missing = _refusal_of_missing(_declared(message_type).name)
    return put, _compiled("message", f"value_type({read})", parts, value_type=value_type, missing=missing)


def _sent(name: str, part: _Part, value: str) -> str:
    """Source code of the argument that sets a message's field."""
    if part.oneof is not None:
        return f"**oneof_{name}.put({value})"
    sent = value if part.form.put is None else f"put_{name}({value})"
    return f"{name}=None if {value} is None else {sent}" if part.may_be_none and sent != value else f"{name}={sent}"


def _read(name: str, part: _Part) -> str:
    """Source code that reads a field from a message."""
    if part.oneof is not None:
        return f"oneof_{name}.take(message)"
    read = f"message.{name}" if part.form.take is None else f"take_{name}(message.{name})"
    if part.has_presence:
        if_absent = f"missing({name!r})" if part.if_absent is ABSENT else f"if_absent_{name}"
        return f"{read} if message.HasField({name!r}) else {if_absent}"
    return f"{read} or None" if part.is_none_if_empty else read


def _compiled(argument: str, result: str, parts: Mapping[str, _Part], **names: Any) -> Callable[[Any], Any]:
    """Compiles a function of `argument` that returns the expression `result`.

    NOTE: compiled, as `dataclasses` does, so that it is as fast as one written by hand. Its source is made only of
    names that the .proto files and our classes declare, never of received data.
    """
    for name, part in parts.items():
        named = {"put": part.form.put, "take": part.form.take, "oneof": part.oneof, "if_absent": part.if_absent}
        names |= {f"{role}_{name}": one for role, one in named.items()}
    return cast(Callable[[Any], Any], eval(f"lambda {argument}: {result}", names))


def _refusal_of_missing(message_name: str) -> Callable[[str], Any]:
    def missing(field: str) -> Any:
        raise InvalidRequestError(f"{field} is missing in {message_name}; its sender must set it")

    return missing


def _unsendable(
    value: object, message_type: type[Message], parts: Mapping[str, _Part], error: Exception
) -> InvalidRequestError:
    """Error that names the field which protobuf could not encode; protobuf's own `error` does not."""
    for name, part in parts.items():
        try:
            given = getattr(value, name)
            sent = f"message_type({_sent(name, part, 'value')})"
            _compiled("value", sent, {name: part}, message_type=message_type)(given)
        except (ValueError, TypeError, OverflowError) as cause:
            return InvalidRequestError(f"{message_type.__name__}.{name}={shown(given)} cannot be sent: {cause}")
    return InvalidRequestError(f"{message_type.__name__} cannot be sent: {error}")
