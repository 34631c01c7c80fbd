"""Label and field selectors, as far as the API defines them: parsed into questions about an object."""

import re
from collections.abc import Callable, Mapping
from typing import Any

Question = Callable[[Mapping[str, Any]], bool]

_SET = re.compile(r"^(\S+)\s+(in|notin)\s+\(([^)]*)\)$")
_EQUALS = re.compile(r"^([^!=\s]+)\s*(!=|==|=)\s*(\S*)$")
_NAME = re.compile(r"^!?[A-Za-z0-9][\w./-]*$")


def label_question(selector: str) -> Question:
    """Raises `ValueError` for what no API server would take."""
    asked = [_requirement(part.strip()) for part in re.split(r",(?![^(]*\))", selector) if part.strip()]

    def matches(found: Mapping[str, Any]) -> bool:
        labels = found.get("metadata", {}).get("labels") or {}
        return all(question(labels) for question in asked)

    return matches


def field_question(selector: str) -> Question:
    asked = [_EQUALS.match(part.strip()) for part in selector.split(",") if part.strip()]
    if None in asked:
        raise ValueError(f"field selector {selector!r} is not understood")
    wanted = [match.groups() for match in asked if match]

    def matches(found: Mapping[str, Any]) -> bool:
        return all((_field(found, path) == value) != (operator == "!=") for path, operator, value in wanted)

    return matches


def _requirement(part: str) -> Question:
    if match := _SET.match(part):
        key, operator, listed = match.groups()
        values = {value.strip() for value in listed.split(",")}
        if operator == "in":
            return lambda labels: labels.get(key) in values
        return lambda labels: labels.get(key) not in values
    if match := _EQUALS.match(part):
        key, operator, value = match.groups()
        return lambda labels: (labels.get(key) == value) != (operator == "!=")
    if _NAME.match(part):
        return lambda labels: (part.lstrip("!") in labels) != part.startswith("!")
    raise ValueError(f"unable to parse requirement: {part!r}")


def _field(found: Mapping[str, Any], path: str) -> str:
    value: Any = found
    for name in path.split("."):
        value = value.get(name, "") if isinstance(value, Mapping) else ""
    return str(value)
