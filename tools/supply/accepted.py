"""Advisories whose risk was accepted, each with a reason and the last day of it, from a TOML file."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path

ACCEPTED = Path(__file__).with_name("accepted.toml")
_REQUIRED = {"id", "until", "reason"}
_OPTIONAL = {"not_called"}


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Args:
    id: of the advisory, or one of its aliases.
    until: its last day.
    not_called: text that the code must not have for the reason to hold; None = the reason is another.
    """

    id: str
    until: date
    reason: str
    not_called: str | None


def read_acceptances(path: Path) -> tuple[Acceptance, ...]:
    """Every `[[accepted]]` table of the file.

    Raises:
        ValueError: one lacks a reason or an end, or the file is no TOML; it is named.
    """
    try:
        tables = tomllib.loads(path.read_text()).get("accepted", [])
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path}: {error}") from error
    return tuple(_acceptance(table, path) for table in tables)


def _acceptance(table: Mapping[str, object], path: Path) -> Acceptance:
    until = table.get("until")
    texts = {name: value for name, value in table.items() if isinstance(value, str) and value.strip()}
    if not _REQUIRED <= table.keys() <= _REQUIRED | _OPTIONAL or texts.keys() != table.keys() - {"until"}:
        raise ValueError(f"{path}: {dict(table)} must have id, until and reason, and may have not_called, all texts")
    if type(until) is not date:
        raise ValueError(f"{path}: until={until!r} of {texts['id']} must be a date, as 2027-01-31")
    return Acceptance(texts["id"], until, texts["reason"], texts.get("not_called"))
