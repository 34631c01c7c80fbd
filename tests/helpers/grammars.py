"""Answers drawn at random from a grammar, and a plain checker of the JSON schemas that tests use."""

import ctypes
import math
import random
import re
from collections.abc import Mapping
from typing import Any

from tandem.text.grammars import GrammarMatcher, Grammars
from tandem.text.tokenizer import Tokenizer

_TYPES: dict[str, type | tuple[type, ...]] = {
    "null": type(None),
    "boolean": bool,
    "integer": int,
    "number": (int, float),
    "string": str,
    "array": list,
    "object": dict,
}
_CLOSING = {bytes([character]) for character in b'}]",:0'}


def allowed_ids(grammars: Grammars, matcher: GrammarMatcher) -> set[int]:
    """Tokens that may come next, and `grammars.end_bit` where the answer may end."""
    buffer = (ctypes.c_uint8 * grammars.mask_bytes)()
    words = (ctypes.c_uint32 * (grammars.mask_bytes // 4)).from_buffer(buffer)
    grammars.fill_masks([(matcher, 0)], ctypes.addressof(words), 1)
    return {index for index in range(grammars.end_bit + 1) if buffer[index // 8] >> index % 8 & 1}


def random_ids(
    grammars: Grammars, tokenizer: Tokenizer, grammar: str, rng: random.Random, max_tokens: int = 200
) -> list[int] | None:
    """The tokens of an answer that ends; None where chance did not end it in time.

    NOTE: closing characters are likelier, or free text would never end.
    """
    matcher = grammars.matcher(grammar)
    closing = {index for index in range(tokenizer.vocab_size) if tokenizer.token_bytes(index) in _CLOSING}
    answer: list[int] = []
    while len(answer) < max_tokens:
        allowed = allowed_ids(grammars, matcher)
        assert matcher.error is None, matcher.error
        if grammars.end_bit in allowed and (len(allowed) == 1 or rng.random() < 0.4):
            return answer
        allowed.discard(grammars.end_bit)
        likely = sorted(allowed & closing)
        answer.append(rng.choice(likely if likely and rng.random() < 0.4 else sorted(allowed)))
        assert matcher.consume(answer[-1:])
    return None


def random_answer(grammars: Grammars, tokenizer: Tokenizer, grammar: str, rng: random.Random) -> str | None:
    """As `random_ids`, the text."""
    found = random_ids(grammars, tokenizer, grammar, rng)
    return None if found is None else b"".join(map(tokenizer.token_bytes, found)).decode()


def schema_faults(value: Any, schema: Any, root: Any) -> list[str]:
    """Reasons why `value` does not match. Knows the keywords of the tests' schemas only; any other raises KeyError."""
    if isinstance(schema, bool):
        return [] if schema else ["nothing matches"]
    checked = {keyword: wanted for keyword, wanted in schema.items() if keyword not in _IGNORED | {"x-anything"}}
    return [
        f"{value!r} breaks {keyword}={wanted!r}"
        for keyword, wanted in checked.items()
        if not _CHECKS[keyword](value, wanted, schema, root)
    ]


def _matches(value: Any, schema: Any, root: Any) -> bool:
    return not schema_faults(value, schema, root)


def _has_type(value: Any, names: Any) -> bool:
    named = [names] if isinstance(names, str) else names
    return any(isinstance(value, _TYPES[name]) and (name == "boolean") == isinstance(value, bool) for name in named)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _reference(name: str, root: Any) -> Any:
    for part in name.split("/")[1:]:
        root = root[part]
    return root


def _object(value: Any, schema: Mapping[str, Any], root: Any) -> bool:
    """properties, patternProperties and additionalProperties together."""
    if not isinstance(value, dict):
        return True
    named, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
    for key, inner in value.items():
        found = [named[key]] if key in named else []
        found += [pattern_schema for pattern, pattern_schema in patterns.items() if re.search(pattern, key)]
        found = found or [schema.get("additionalProperties", True)]
        if not all(_matches(inner, one, root) for one in found):
            return False
    return True


def _array(value: Any, schema: Mapping[str, Any], root: Any) -> bool:
    if not isinstance(value, list):
        return True
    prefix = schema.get("prefixItems", [])
    schemas = [*prefix, *[schema.get("items", True)] * (len(value) - len(prefix))]
    return all(_matches(inner, one, root) for inner, one in zip(value, schemas, strict=False))


_IGNORED = {"$defs", "$schema", "title", "default", "nullable"}
_CHECKS: dict[str, Any] = {
    "type": lambda v, w, s, r: _has_type(v, w),
    "const": lambda v, w, s, r: v == w,
    "enum": lambda v, w, s, r: v in w,
    "$ref": lambda v, w, s, r: _matches(v, _reference(w, r), r),
    "anyOf": lambda v, w, s, r: any(_matches(v, one, r) for one in w),
    "oneOf": lambda v, w, s, r: sum(_matches(v, one, r) for one in w) == 1,
    "allOf": lambda v, w, s, r: all(_matches(v, one, r) for one in w),
    "required": lambda v, w, s, r: not isinstance(v, dict) or set(w) <= v.keys(),
    "properties": lambda v, w, s, r: _object(v, s, r),
    "patternProperties": lambda v, w, s, r: _object(v, s, r),
    "additionalProperties": lambda v, w, s, r: _object(v, s, r),
    "minProperties": lambda v, w, s, r: not isinstance(v, dict) or len(v) >= w,
    "items": lambda v, w, s, r: _array(v, s, r),
    "prefixItems": lambda v, w, s, r: _array(v, s, r),
    "minItems": lambda v, w, s, r: not isinstance(v, list) or len(v) >= w,
    "maxItems": lambda v, w, s, r: not isinstance(v, list) or len(v) <= w,
    "minLength": lambda v, w, s, r: not isinstance(v, str) or len(v) >= w,
    "maxLength": lambda v, w, s, r: not isinstance(v, str) or len(v) <= w,
    "pattern": lambda v, w, s, r: not isinstance(v, str) or re.search(w, v),
    "format": lambda v, w, s, r: w == "date" and re.fullmatch(r"\d{4}-\d\d-\d\d", v),
    "minimum": lambda v, w, s, r: not _is_number(v) or v >= w,
    "maximum": lambda v, w, s, r: not _is_number(v) or v <= w,
    "exclusiveMaximum": lambda v, w, s, r: not _is_number(v) or v < w,
    "multipleOf": lambda v, w, s, r: not _is_number(v) or math.isclose(v % w, 0),
}
