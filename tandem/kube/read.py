"""Typed reads of fields of Kubernetes API objects. A field of the wrong type is an error; null counts as absent.

Functions that read raise `ValueError` naming the field; callers turn it into `BadAnswerError`.
"""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from tandem.core.errors import shown


def mapping(parent: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """An object; empty when absent."""
    value = parent.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ValueError(f"{name}={shown(value)} is not an object")
    return value


def items(parent: Mapping[str, Any], name: str) -> Sequence[Mapping[str, Any]]:
    """A list of objects; empty when absent."""
    value = parent.get(name)
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
        raise ValueError(f"{name}={shown(value)} is not a list of objects")
    return value


def text(parent: Mapping[str, Any], name: str, default: str | None = "") -> str:
    """A string; `default` when absent. With a default of None an absent field is an error."""
    value = parent.get(name, default)
    if value is None and default is not None:
        return default
    if not isinstance(value, str):
        raise ValueError(f"{name}={shown(value)} is not text")
    return value


def number(parent: Mapping[str, Any], name: str, default: int | None = 0) -> int:
    """A whole number; `default` when absent. With a default of None an absent field is an error."""
    value = parent.get(name, default)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{name}={shown(value)} is not a whole number")
    return value


def string_mapping(parent: Mapping[str, Any], name: str) -> Mapping[str, str]:
    """A mapping of strings, such as labels; empty when absent."""
    value = mapping(parent, name)
    if not all(isinstance(key, str) and isinstance(item, str) for key, item in value.items()):
        raise ValueError(f"{name}={shown(value)} has something else than text")
    return value


def moment_s(parent: Mapping[str, Any], name: str) -> float | None:
    """A time as seconds since 1970; None when absent."""
    value = text(parent, name)
    try:
        return datetime.fromisoformat(value).timestamp() if value else None
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{name}={shown(value)} is no time") from error


def written_moment(moment: float) -> str:
    """Formats a time, seconds since 1970, as the API's MicroTime."""
    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
