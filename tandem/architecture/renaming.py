"""Renaming of tensors in a spec, for a layer that is built like another but stored under other names."""

from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

T = TypeVar("T")


def renamed(spec: T, old: str, new: str) -> T:
    """`spec` with tensor names that begin with `old` beginning with `new` instead."""
    found: Any = _renamed(spec, old, new)
    return found  # type: ignore[no-any-return]


def _renamed(value: Any, old: str, new: str) -> Any:
    if isinstance(value, str):
        return new + value.removeprefix(old) if value.startswith(old) else value
    if isinstance(value, tuple):
        return tuple(_renamed(part, old, new) for part in value)
    if not is_dataclass(value) or isinstance(value, type):
        return value
    before = {field.name: getattr(value, field.name) for field in fields(value) if field.init}
    after = {name: _renamed(part, old, new) for name, part in before.items()}
    changed = {name: part for name, part in after.items() if part is not before[name]}
    return replace(value, **changed) if changed else value
