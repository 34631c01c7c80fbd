"""Reads records that another release may have written: unknown fields are ignored."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any


def known_fields(kind: type, record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries of a record for which the dataclass `kind` has a field."""
    names = {field.name for field in fields(kind)}
    return {name: value for name, value in record.items() if name in names}
