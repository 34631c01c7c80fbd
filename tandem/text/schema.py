"""Validates JSON schemas and rewrites them so that llguidance, the grammar compiler, enforces them completely.

Invariant: every keyword is either enforced, or an annotation that is left out, or refused by name. Nothing recurses
before the depth is known.
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard
from urllib.parse import quote, unquote

from tandem.core.errors import InvalidRequestError, shown
from tandem.text.pattern import without_nul
from tandem.text.schema_numbers import NUMBERS, are_joinable, number_fault, with_safe_bounds
from tandem.text.schema_recursion import endless_place

MAX_SCHEMA_DEPTH = 100
MAX_SCHEMA_CHARACTERS = 2**18
MAX_SCHEMA_REFERENCES = 256
MAX_PATTERN_CHARACTERS = 4096
_MAX_COMPARED = 2**16  # options of all oneOf, and texts that distinguish them, that are compared
_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,32}"  # NOTE: between tokens of JSON; unbounded, a model may never leave it

_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("prefixItems", "anyOf", "oneOf", "allOf")
_SINGLES = ("additionalProperties", "additionalItems")
_COUNTS = ("minItems", "maxItems", "minProperties", "maxProperties", "minLength", "maxLength")
_PLAIN = frozenset({"const", "enum", "type", "required", "pattern", "format", "$ref", *NUMBERS, *_COUNTS})
_ANNOTATIONS = frozenset(
    {
        *("$schema", "$id", "id", "$anchor", "$comment", "title", "description", "default", "example", "examples"),
        *("readOnly", "writeOnly", "deprecated", "contentMediaType", "contentEncoding", "contentSchema"),
        *("discriminator", "propertyOrdering", "enumNames", "markdownDescription"),
    }
)
_Path = tuple[str, ...]


def enforceable(schema: object) -> dict[str, Any]:
    """`schema` rewritten for llguidance (`%json` or `json_schema`), with the same meaning.

    Raises:
        InvalidRequestError: naming the place and the keyword that cannot be enforced, or the limit that is passed.
    """
    _check_json(schema)
    found = _Walk()
    whole = found.rewrite(schema, ())
    found.check_references()
    found.check_multiples()
    found.widen_exclusive()
    found.follow_renamed()
    if whole is False:
        raise InvalidRequestError("the schema is false, which nothing matches")
    options = {"whitespace_pattern": _WHITESPACE, "lenient": False}
    return {"x-guidance": options, **({} if whole is True else whole)}


def check_size(text: str, name: str, maximum: int) -> None:
    """Raises InvalidRequestError where `text` has more than `maximum` characters."""
    if len(text) > maximum:
        raise InvalidRequestError(f"{name} has {len(text)} characters; at most {maximum} are accepted")


def _check_json(schema: object) -> None:
    """Refuses values that are not JSON, too deep or too large."""
    _check_depth(schema)
    try:
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"the schema is not JSON: {error}") from error
    check_size(text, "the schema", MAX_SCHEMA_CHARACTERS)


def _check_depth(value: object) -> None:
    waiting: list[Iterator[object]] = [iter((value,))]
    num_values = 0
    while waiting:
        found = next(waiting[-1], waiting)
        if found is waiting:
            waiting.pop()
            continue
        num_values += 1
        if num_values > MAX_SCHEMA_CHARACTERS:
            raise InvalidRequestError(f"the schema has more than {MAX_SCHEMA_CHARACTERS} values")
        if isinstance(found, Mapping):
            if not all(isinstance(key, str) for key in found):
                raise InvalidRequestError("the schema is not JSON: an object's keys are texts")
            waiting.append(iter(found.values()))
        elif isinstance(found, (list, tuple)):
            waiting.append(iter(found))
        if len(waiting) > MAX_SCHEMA_DEPTH + 1:
            raise InvalidRequestError(f"the schema is nested more than {MAX_SCHEMA_DEPTH} deep")


class _Walk:
    """One pass over a schema: rewrites its parts and collects its references."""

    def __init__(self) -> None:
        self._schemas: dict[_Path, object] = {}
        self._rewritten: list[tuple[_Path, dict[str, Any]]] = []
        self._renamed: dict[_Path, str] = {}  # place → the last part of its path after the rewriting
        self._targets: dict[_Path, _Path] = {}  # place of a schema with a reference → what it names
        self._followed: dict[str, object] = {}  # reference → what it stands for
        self._options: dict[int, _Option] = {}  # by the schema's identity

    def rewrite(self, schema: object, path: _Path) -> dict[str, Any] | bool:
        """Rewrites the schema at `path`, without its annotations."""
        self._schemas[path] = schema
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, Mapping):
            raise _refusal(path, f"{shown(schema)} is no schema; an object or a boolean is needed")
        _check_keywords(schema, path)
        counted = with_safe_bounds({key: value for key, value in schema.items() if _counts(key)})
        rewritten = {key: self._rewrite_keyword(key, value, path) for key, value in counted.items()}
        self._rewritten.append((path, rewritten))
        return rewritten

    def widen_exclusive(self) -> None:
        """Replaces oneOf by anyOf where the options exclude each other; llguidance does not detect this behind
        references.

        NOTE: too large comparisons are skipped; llguidance then refuses the oneOf unless it can tell itself.
        """
        num_compared = 0
        for path, schema in self._rewritten:
            if "oneOf" in schema and "anyOf" not in schema:
                options = [self._option(option) for option in schema["oneOf"]]
                num_compared += sum(option.size for option in options)
                if num_compared > _MAX_COMPARED:
                    return
                if _exclude_each_other(options):
                    schema["anyOf"] = schema.pop("oneOf")
                    self._renamed[(*path, "oneOf")] = "anyOf"

    def follow_renamed(self) -> None:
        """Writes every reference as the URI that llguidance requires, to the place that its target has now."""
        for path, schema in self._rewritten:
            if "$ref" in schema:
                target = self._targets[path]
                names = [self._renamed.get(target[: index + 1], name) for index, name in enumerate(target)]
                schema["$ref"] = "/".join(("#", *map(_pointed, names)))

    def check_references(self) -> None:
        """Raises InvalidRequestError for a reference to a place that holds no schema or leads back without end, and
        for too many references.
        """
        for path, target in self._targets.items():
            if target not in self._schemas:
                raise _refusal(path, f"$ref names {'/'.join(('#', *target))!r}, where there is no schema")
        num_targets = len(set(self._targets.values()))
        if num_targets > MAX_SCHEMA_REFERENCES:
            raise InvalidRequestError(
                f"the schema refers to {num_targets} places; at most {MAX_SCHEMA_REFERENCES} are accepted"
            )
        endless = endless_place(self._schemas, self._targets)
        if endless is not None:
            raise _refusal(
                endless, "a value would contain itself without end; let it be left out, or be something else"
            )

    def check_multiples(self) -> None:
        """Refuses multiples that llguidance could not enforce at once, if any two may hold for one number.

        NOTE: which ones do, only llguidance finds out.
        """
        schemas = [schema for _, schema in self._rewritten]
        multiples = [schema["multipleOf"] for schema in schemas if "multipleOf" in schema]
        if any(map(_joins, schemas)) and not are_joinable(multiples):
            raise InvalidRequestError("the schema's multipleOf are too large to be enforced at once; use smaller ones")

    def _rewrite_keyword(self, key: str, value: Any, path: _Path) -> Any:
        here = (*path, key)
        if key in _MAPS:
            if not isinstance(value, Mapping):
                raise _refusal(path, f"{key} must be an object")
            if key == "patternProperties":
                self._renamed |= {(*here, name): without_nul(name) for name in value}
            return {
                self._renamed.get((*here, name), name): self.rewrite(inner, (*here, name))
                for name, inner in value.items()
            }
        if key in _LISTS or (key == "items" and isinstance(value, (list, tuple))):
            if not isinstance(value, (list, tuple)):
                raise _refusal(path, f"{key} must be a list")
            return [self.rewrite(inner, (*here, str(index))) for index, inner in enumerate(value)]
        if key in _SINGLES or key == "items":
            return self.rewrite(value, here)
        if key == "$ref":
            self._targets[path] = _target(value, path)
        return without_nul(value) if key == "pattern" and isinstance(value, str) else value

    def _option(self, schema: object) -> "_Option":
        """NOTE: each reference is followed, and its target read, only once, however many options name it."""
        if _is_reference(schema):
            reference = schema["$ref"]
            if reference not in self._followed:
                self._followed[reference] = self._end_of(schema)
            schema = self._followed[reference]
        if id(schema) not in self._options:
            self._options[id(schema)] = _Option.of(schema)
        return self._options[id(schema)]

    def _end_of(self, schema: object) -> object:
        """The target of a schema that is only a reference."""
        for _ in range(MAX_SCHEMA_DEPTH):
            if not _is_reference(schema):
                break
            schema = self._schemas[_target(schema["$ref"], ())]
        return schema


def _counts(key: str) -> bool:
    return key not in _ANNOTATIONS and not key.startswith("x-") and key != "nullable"


def _joins(schema: Mapping[str, Any]) -> bool:
    """Whether a value may have to match several schemas because of this one."""
    num_others = len(schema.keys() - {"$defs", "definitions"}) - 1
    return (
        "allOf" in schema
        or "patternProperties" in schema
        or (num_others > 0 and not {"$ref", "anyOf", "oneOf"}.isdisjoint(schema))
    )


def _check_keywords(schema: Mapping[str, Any], path: _Path) -> None:
    for key, value in schema.items():
        known = key in _PLAIN or key in _MAPS or key in _LISTS or key in _SINGLES or key == "items"
        if key == "nullable" and value is not False:
            raise _refusal(path, "nullable cannot be enforced; name null among the types")
        if key == "$id" and path:
            raise _refusal(path, "an inner $id cannot be enforced; refer from the schema's beginning")
        if key == "x-guidance" or (_counts(key) and not known):
            raise _refusal(path, f"{key} cannot be enforced")
    _check_items(schema, path)
    _check_values(schema, path)
    _check_num_properties(schema, path)


def _check_items(schema: Mapping[str, Any], path: _Path) -> None:
    if "prefixItems" in schema and ("additionalItems" in schema or isinstance(schema.get("items"), (list, tuple))):
        raise _refusal(path, "prefixItems cannot be enforced beside additionalItems or a list of items")


def _check_values(schema: Mapping[str, Any], path: _Path) -> None:
    fault = number_fault(schema)
    if fault is not None:
        raise _refusal(path, fault)
    pattern = schema.get("pattern")
    if isinstance(pattern, str):
        check_size(pattern, f"the schema's pattern at {_shown_path(path)}", MAX_PATTERN_CHARACTERS)
    named = schema.get("type", "object")
    if not isinstance(named, str) and not (isinstance(named, (list, tuple)) and all(isinstance(t, str) for t in named)):
        raise _refusal(path, f"type={shown(named)} must be a type's name, or a list of them")


def _check_num_properties(schema: Mapping[str, Any], path: _Path) -> None:
    """NOTE: a grammar cannot prevent a repeated key, and then there are fewer properties than it counted."""
    least = schema.get("minProperties", 0)
    num_required = len(_required(schema))
    is_closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    if isinstance(least, int) and least > num_required and not is_closed:
        raise _refusal(path, "minProperties cannot be enforced where keys are free; require them by name")


@dataclass(frozen=True, slots=True)
class _Option:
    """One option of a oneOf.

    Args:
        types: every type it may have; integers are numbers.
        texts: allowed texts of required keys that are limited to some texts.
    """

    types: frozenset[str]
    texts: Mapping[str, frozenset[str]]

    @classmethod
    def of(cls, schema: object) -> "_Option":
        """NOTE: a boolean schema has no constraints."""
        keywords: Mapping[str, Any] = schema if isinstance(schema, Mapping) else {}
        named = keywords.get("type", ("null", "boolean", "number", "string", "array", "object"))
        names = {named} if isinstance(named, str) else named
        texts = {key: found for key in _required(keywords) if (found := _texts(keywords, key))}
        return cls(frozenset("number" if name == "integer" else name for name in names), texts)

    @property
    def size(self) -> int:
        return 1 + sum(map(len, self.texts.values()))


def _exclude_each_other(options: Sequence[_Option]) -> bool:
    """Whether no value can match two of the options.

    So it is if their types are disjoint, or if those that are objects require different texts for one common key.
    """
    objects = [option for option in options if option.types == {"object"}]
    types = [option.types for option in options if option.types != {"object"}]
    if not _are_disjoint([*types, {"object"}] if objects else types):
        return False
    shared = set.intersection(*(set(option.texts) for option in objects)) if objects else set()
    return len(objects) < 2 or any(_are_disjoint([option.texts[key] for option in objects]) for key in shared)


def _are_disjoint(sets: Sequence[Collection[str]]) -> bool:
    return sum(map(len, sets)) == len(set().union(*sets))


def _required(schema: Mapping[str, Any]) -> set[str]:
    names = schema.get("required")
    return set(map(str, names)) if isinstance(names, (list, tuple)) else set()


def _texts(schema: Mapping[str, Any], key: str) -> frozenset[str]:
    """The texts to which a property is limited; none where it is not limited to texts."""
    properties = schema.get("properties")
    found = properties.get(key) if isinstance(properties, Mapping) else None
    if not isinstance(found, Mapping):
        return frozenset()
    values = [found["const"]] if "const" in found else found.get("enum")
    if not isinstance(values, (list, tuple)) or not all(isinstance(value, str) for value in values):
        return frozenset()
    return frozenset(values)


def _is_reference(schema: object) -> TypeGuard[Mapping[str, Any]]:
    """Whether a schema is a reference and nothing else."""
    return isinstance(schema, Mapping) and schema.keys() == {"$ref"}


def _target(reference: object, path: _Path) -> _Path:
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        raise _refusal(path, f"$ref={shown(reference)} cannot be followed; only places within the schema can ('#/...')")
    names = unquote(reference).split("/")[1:]
    return tuple(name.replace("~1", "/").replace("~0", "~") for name in names)


def _pointed(name: str) -> str:
    """A name as a part of a JSON pointer in a URI."""
    return quote(name.replace("~", "~0").replace("/", "~1"), safe="$")


def _refusal(path: Sequence[str], reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"the schema at {_shown_path(path)}: {reason}")


def _shown_path(path: Sequence[str]) -> str:
    return shown("/".join(("#", *path)))
