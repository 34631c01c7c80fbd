"""Reading of records that another release may have written: fields that this one does not know are passed over."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any


def known_fields(kind: type, record: Mapping[str, Any]) -> dict[str, Any]:
    """Of a record, what the dataclass `kind` has a field for. A newer release may have written more."""
    names = {field.name for field in fields(kind)}
    return {name: value for name, value in record.items() if name in names}
