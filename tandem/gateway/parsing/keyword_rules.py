"""Writes grammar rules for keyword arguments (`name=value`) from a tool's JSON schema. Pure text.

Values are JSON except for True, False and None, which the models write instead of true, false and null.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tandem.core.errors import InvalidRequestError, shown
from tandem.gateway.parsing.call_rules import ANY_OBJECT, Callee
from tandem.gateway.parsing.lark import choice, json_rule, literal

_KEYWORD = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_SHARED = ("$defs", "definitions")
_SHARED_PLACES = tuple(
    f"#/{key}/" for key in _SHARED
)  # NOTE: a value's rule is a root of its own, which has these only
_UNDERSTOOD = frozenset({"type", "properties", "required", "additionalProperties", "x-guidance", *_SHARED})


def keyword_rules(callee: Callee, rule: str) -> str:
    """Rules for the text between a call's parentheses; arguments come in the order of the schema's properties.

    Raises:
        InvalidRequestError: keyword arguments cannot express the schema of a strict tool.
    """
    awkward = None if callee.schema is ANY_OBJECT else _awkward(callee.schema)
    if callee.is_strict and awkward is not None:
        raise InvalidRequestError(
            f"this model calls with keyword arguments, which cannot express {shown(awkward)} in the parameters of the "
            f"strict tool {callee.name!r}; leave it out"
        )
    if callee.schema is ANY_OBJECT or awkward is not None:
        return _any_keywords(rule, True, {})
    properties = callee.schema.get("properties", {})
    shared = {key: callee.schema[key] for key in _SHARED if key in callee.schema}
    others = callee.schema.get("additionalProperties", True)
    if not properties and others is not False:
        return _any_keywords(rule, others, shared)
    values = "".join(
        _value_rule(f"{rule}_v{index}", schema, shared) for index, schema in enumerate(properties.values())
    )
    return _sequence(rule, list(properties), frozenset(callee.schema.get("required", ()))) + values


def _any_keywords(rule: str, schema: Any, shared: Mapping[str, Any]) -> str:
    """Rules for arguments of any names with values of this schema."""
    pair = f'/[A-Za-z_][A-Za-z0-9_]*/ "=" {rule}_v'
    return f'{rule}: ({pair} (", " {pair})*)?\n' + _value_rule(f"{rule}_v", schema, shared)


def _awkward(schema: Mapping[str, Any]) -> str | None:
    """The first part of a schema that keyword arguments cannot express, or None."""
    names = [*schema.get("properties", ()), *schema.get("required", ())]
    awkward = [name for name in names if not _KEYWORD.fullmatch(name)]
    awkward += [name for name in schema.get("required", ()) if name not in schema.get("properties", ())]
    awkward += [keyword for keyword in schema if keyword not in _UNDERSTOOD]
    awkward += [f"$ref: {found}" for found in _references(schema) if not found.startswith(_SHARED_PLACES)]
    return awkward[0] if awkward else None


def _references(value: Any) -> Iterator[str]:
    """All `$ref` values. NOTE: data that looks like one counts too, which refuses too much rather than too little."""
    if isinstance(value, Mapping):
        reference = value.get("$ref")
        if isinstance(reference, str):
            yield reference
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for inner in value:
            yield from _references(inner)


def _sequence(rule: str, names: Sequence[str], required: frozenset[str]) -> str:
    """Rules for all properties. `{rule}_f{i}`: property i and later, none written yet; `{rule}_m{i}`: some written."""
    rules = [f"{rule}: {rule}_f0\n", f'{rule}_f{len(names)}: ""\n', f'{rule}_m{len(names)}: ""\n']
    for index, name in enumerate(names):
        pair = f"{rule}_v{index} {rule}_m{index + 1}"
        first = [f"{literal(name + '=')} {pair}"]
        more = [f"{literal(', ' + name + '=')} {pair}"]
        if name not in required:
            first.append(f"{rule}_f{index + 1}")
            more.append(f"{rule}_m{index + 1}")
        rules += [choice(f"{rule}_f{index}", first), choice(f"{rule}_m{index}", more)]
    return "".join(rules)


def _value_rule(rule: str, schema: Any, shared: Mapping[str, Any]) -> str:
    plain = schema if isinstance(schema, Mapping) else {} if schema is True else {"not": {}}
    kind = plain.get("type")
    if kind == "boolean" and not {"const", "enum"} & plain.keys():
        return f'{rule}: "True" | "False"\n'
    if kind == "null":
        return f'{rule}: "None"\n'
    return json_rule(rule, {**plain, **shared})
