"""Finds schemas that no finite value matches because they require themselves without end. Pure.

An answer that began such a value could only break off. NOTE: a schema that nothing matches for another reason is not
looked for; llguidance leaves it out, or refuses it.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Path = tuple[str, ...]


def endless_place(schemas: Mapping[Path, object], targets: Mapping[Path, Path]) -> Path | None:
    """The first place of a schema that requires itself without end; None if there is none.

    Args:
        schemas: every schema of a document, by its place.
        targets: places that references lead to, by the place of the schema with the reference.
    """
    num_open: dict[Path, int] = {}  # needs of a schema that are not yet known to come to an end
    waiting_for: dict[Path, list[_Need]] = {}
    ended: list[Path] = []
    for path, schema in schemas.items():
        needs = [_Need(path, options) for options in _needs(schema, path, targets) if options]
        num_open[path] = len(needs)
        for need in needs:
            for option in need.options:
                waiting_for.setdefault(option, []).append(need)
        if not needs:
            ended.append(path)
    while ended:
        for need in waiting_for.get(ended.pop(), ()):
            num_open[need.owner] -= not need.is_met
            if not need.is_met and not num_open[need.owner]:
                ended.append(need.owner)
            need.is_met = True
    return next((path for path, num in num_open.items() if num), None)


class _Need:
    """Schemas of which a value of the schema at `owner` has to match one."""

    def __init__(self, owner: Path, options: Sequence[Path]) -> None:
        self.owner = owner
        self.options = options
        self.is_met = False


def _needs(schema: object, path: Path, targets: Mapping[Path, Path]) -> Iterator[Sequence[Path]]:
    if not isinstance(schema, Mapping):
        return
    if path in targets:
        yield (targets[path],)
    for place in _listed(schema, path, "allOf"):
        yield (place,)
    for key in ("anyOf", "oneOf"):
        yield _listed(schema, path, key)
    if schema.get("type") == "object":
        yield from _required_members(schema, path)
    elif schema.get("type") == "array":
        yield from _required_items(schema, path)


def _listed(schema: Mapping[str, Any], path: Path, key: str) -> list[Path]:
    found = schema.get(key)
    return [(*path, key, str(index)) for index in range(len(found))] if isinstance(found, (list, tuple)) else []


def _required_members(schema: Mapping[str, Any], path: Path) -> Iterator[Sequence[Path]]:
    required, properties = schema.get("required"), schema.get("properties")
    if isinstance(required, (list, tuple)) and isinstance(properties, Mapping):
        for name in required:
            if isinstance(name, str) and name in properties:
                yield ((*path, "properties", name),)


def _required_items(schema: Mapping[str, Any], path: Path) -> Iterator[Sequence[Path]]:
    least = schema.get("minItems")
    if not isinstance(least, int):
        return
    first = _listed(schema, path, "prefixItems" if "prefixItems" in schema else "items")
    yield from ((place,) for place in first[: max(least, 0)])
    if least > len(first) and isinstance(schema.get("items"), Mapping):
        yield ((*path, "items"),)
