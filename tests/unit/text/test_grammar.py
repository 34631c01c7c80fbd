"""Builders of grammars: what they write down is enforced, and what could not be is refused by name."""

import json
import random
import re
import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any
from urllib.parse import quote

import pytest

from tandem.core.errors import InvalidRequestError
from tandem.text.grammar import (
    MAX_CHOICES,
    MAX_LARK_CHARACTERS,
    MAX_REGEX_CHARACTERS,
    Grammars,
    choice_grammar,
    json_object_grammar,
    lark_grammar,
    regex_grammar,
    schema_grammar,
)
from tandem.text.schema import MAX_SCHEMA_CHARACTERS, MAX_SCHEMA_DEPTH, MAX_SCHEMA_REFERENCES
from tandem.text.tokenizer import Tokenizer
from tests.helpers.grammars import allowed_ids, random_answer, schema_faults
from tests.helpers.tokenizers import NUM_TOKENS, write_byte_tokenizer
from tests.unit.gateway.parsing.walking import Walker

A_OR_B = {
    "$defs": {
        kind: {
            "type": "object",
            "properties": {"kind": {"const": kind}, "n": {"type": "integer"}},
            "required": ["kind"],
        }
        for kind in ("a", "b")
    },
    "oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
}
TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "boolean"},
                "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]},
            },
            "required": ["value", "next"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}
ENFORCED: list[Any] = [
    {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}}, "required": ["b"]},
    {"type": "object", "properties": {"a": {"type": "null"}}, "additionalProperties": False, "minProperties": 1},
    {"type": "object", "patternProperties": {"^x": {"type": "integer"}}, "additionalProperties": False},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3},
    {"type": "array", "prefixItems": [{"type": "boolean"}, {"type": "null"}], "items": False, "minItems": 1},
    {"type": "string", "minLength": 2, "maxLength": 4},
    {"type": "string", "pattern": "^[ab]+é$", "maxLength": 5},
    {"type": "string", "pattern": '^[^"]+$'},
    {"type": "object", "patternProperties": {r"^[^\\]+$": {"type": "integer"}}, "additionalProperties": False},
    {"type": "string", "format": "date"},
    {"type": "integer", "minimum": -3, "exclusiveMaximum": 12},
    {"type": "integer", "multipleOf": 7},
    {"type": "number", "minimum": 0.5, "maximum": 1.25},
    {"enum": ["a", 1, None, [True, {"k": "v"}], 2.5]},
    {"const": {'quote"': "back\\slash\n", "é": [1, 2]}},
    {"type": ["string", "null"], "maxLength": 2},
    {"allOf": [{"type": "object", "required": ["a"]}, {"properties": {"a": {"type": "integer", "maximum": 5}}}]},
    {"title": "T", "default": {}, "x-anything": {"not": 1}, "type": "boolean", "nullable": False},
    {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "array",
        "prefixItems": [{"const": 1}],
        "items": False,
    },
    A_OR_B,
    {"oneOf": [{"type": "null"}, {"type": "string"}, *A_OR_B["oneOf"]], "$defs": A_OR_B["$defs"]},
    TREE,
    True,
    {},
]
LINK = {"type": "object", "required": ["next"]}
REFUSED: list[tuple[Any, str]] = [
    *(
        ({key: value}, re.escape(key))
        for key, value in {
            "not": {},
            "if": {},
            "then": {},
            "uniqueItems": True,
            "contains": {},
            "propertyNames": {},
            "dependentRequired": {},
            "unevaluatedProperties": False,
            "$dynamicRef": "#",
            "minimumm": 1,
            "x-guidance": {"lenient": True},
        }.items()
    ),
    ({"properties": {"a": {"type": "string", "nullable": True}}}, "nullable"),
    ({"items": {"anyOf": [{"not": {}}]}}, "#/items/anyOf/0"),
    ({"$defs": {"a": {"uniqueItems": True}}}, "uniqueItems"),
    ({"$ref": "http://example.com/schema"}, "'#/...'"),
    ({"$ref": "other.json#/a"}, "'#/...'"),
    ({"$ref": "#/$defs/missing"}, "no schema"),
    ({"$ref": "#"}, "at '#'.*without end"),
    ({"items": {"anyOf": [{"$ref": "#/items"}, {"allOf": [True, {"$ref": "#/items"}]}]}}, "#/items'.*without end"),
    ({"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"$ref": "#/$defs/b"}}}, "properties/a.*without end"),
    ({"anyOf": [{"type": "null"}, {**LINK, "properties": {"next": {"$ref": "#/anyOf/1"}}}]}, "anyOf/1.*without end"),
    ({"$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}, "minItems": 1}}}, "defs/a.*without end"),
    ({"prefixItems": [{"$ref": "#"}], "type": "array", "minItems": 1}, "at '#'.*without end"),
    ({"$ref": "#/x-hidden", "x-hidden": {"not": {}}}, "no schema"),
    ({"properties": {"a": {"$id": "http://example.com/a"}}}, r"\$id"),
    ({"prefixItems": [True], "additionalItems": False}, "additionalItems"),
    ({"prefixItems": [True], "items": [True]}, "list of items"),
    ({"type": "object", "minProperties": 2}, "minProperties"),
    ({"const": 2**60}, "2\\^53"),
    ({"enum": [{"a": [-(2**60)]}]}, "2\\^53"),
    ({"multipleOf": 1000003}, "multipleOf"),
    ({"multipleOf": 0.1234567}, "multipleOf"),
    ({"multipleOf": 0}, "multipleOf"),
    ({"multipleOf": True}, "multipleOf=True"),
    ({"multipleOf": "2"}, "multipleOf='2'"),
    ({"multipleOf": 1e-320, "maximum": 0.5}, "multipleOf=1e-320 has too many digits"),
    ({"multipleOf": 0.1, "minimum": "low"}, "minimum='low' must be a number"),
    ({"multipleOf": 0.1, "maximum": None, "exclusiveMaximum": 2}, "maximum=None must be a number"),
    ({"minimum": True}, "minimum=True must be a number"),
    ({"exclusiveMaximum": []}, "exclusiveMaximum=.* must be a number"),
    ({"allOf": [{"multipleOf": 7}, {"multipleOf": 1e-9}]}, "multipleOf.*at once"),
    ({"allOf": [{"multipleOf": multiple} for multiple in (9999, 9998, 9997)]}, "multipleOf.*at once"),
    ({"type": "integer", "enum": [1e20]}, "enum holds an integer beyond 2\\^53"),
    ({"type": "integer", "minimum": 1e19, "maximum": 1e20}, "2\\^53"),
    ({"exclusiveMinimum": True}, "exclusiveMinimum=true has no meaning without minimum"),
    ({"minimum": 1, "exclusiveMaximum": True}, "exclusiveMaximum=true"),
    ({"oneOf": [{"type": None}, {"type": "string"}]}, "#/oneOf/0.*type=None"),
    ({"type": ["string", 5]}, "type="),
    ({"pattern": "a" * 5000}, "5000 characters"),
    ({"properties": []}, "properties must be an object"),
    ({"anyOf": {}}, "anyOf must be a list"),
    ({"multipleOf": 0.1, "minimum": -1, "allOf": 5}, "allOf must be a list"),
    ({"items": 3}, "no schema"),
    (False, "false"),
    ("text", "no schema"),
    (None, "no schema"),
    ({"const": float("nan")}, "not JSON"),
    ({"const": b"bytes"}, "not JSON"),
    ({1: 2}, "not JSON"),
    ({"const": "\ud800"}, "not JSON"),
    ({"const": "x" * MAX_SCHEMA_CHARACTERS}, "characters"),
    ({"const": [0] * MAX_SCHEMA_CHARACTERS}, "values"),
]
COMPILED_AND_REFUSED: list[tuple[Any, str]] = [
    ({"type": "string", "format": "no-such"}, "no-such"),
    ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "use anyOf"),
    ({"type": "string", "pattern": "(?=a)b"}, "look"),
    ({"enum": []}, "nsatisfiable"),
    ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum"),
    ({"type": "object", "required": ["z"], "additionalProperties": False}, "'z'"),
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_byte_tokenizer(tmp_path_factory.mktemp("bytes")))


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Iterator[Grammars]:
    found = Grammars(tokenizer, NUM_TOKENS, (NUM_TOKENS - 1,))
    yield found
    found.close()


def _answers(grammars: Grammars, tokenizer: Tokenizer, grammar: str, num_seeds: int = 40) -> list[str]:
    """Random answers that came to an end."""
    drawn = [random_answer(grammars, tokenizer, grammar, random.Random(seed)) for seed in range(num_seeds)]
    complete = [answer for answer in drawn if answer is not None]
    assert complete, "no seed came to an end"
    return complete


@pytest.mark.parametrize("schema", ENFORCED, ids=lambda schema: json.dumps(schema)[:60])
def test_whatever_is_chosen_matches_the_schema(grammars: Grammars, tokenizer: Tokenizer, schema: Any) -> None:
    for answer in _answers(grammars, tokenizer, schema_grammar(schema)):
        assert not schema_faults(json.loads(answer), schema, schema), answer


@pytest.mark.parametrize(("schema", "message"), REFUSED, ids=lambda part: str(part)[:60])
def test_what_cannot_be_enforced_is_refused_by_name(schema: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        schema_grammar(schema)


@pytest.mark.parametrize(("schema", "message"), COMPILED_AND_REFUSED, ids=lambda part: str(part)[:60])
def test_what_no_answer_could_match_is_refused_when_it_is_compiled(
    grammars: Grammars, schema: Any, message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        grammars.compiled(schema_grammar(schema))


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        ('^[^"]+$', ["a\n", "\\", "é"], ['"', 'a"b']),
        ("^[^'\"]+$", ["a", "\\"], ["'", 'a"']),
        (r"^[^\\]+$", ["a", '"'], ["\\", "a\\b"]),
        (r"^[^\s\x22\\]*$", ["", "a/"], ['"', "\\", "\n", "a b"]),
        (r"^[^]\"]$", ["[", "a"], ["]", '"']),
        (r"^[^\]\"]$", ["[", "a"], ["]", '"']),
        ('^"[^"]*"$', ['"a"', '""'], ["a", '"""']),
        (r"^\P{P}[\p{L}]$", ["aa", "1a"], ['"a', "\\a"]),
        ("^[[:cntrl:]]$", ["\n", "\x01"], ['"', "\\"]),
        (r"^[\s\S]\[.$", ['"["', "\\[a"], ["a]", "a["]),
    ],
)
def test_a_pattern_excludes_what_is_written_with_an_escape(
    grammars: Grammars, tokenizer: Tokenizer, pattern: str, good: list[str], bad: list[str]
) -> None:
    r"""Regression: a class that has every control character let `\"` and `\\` pass."""
    walker = Walker(tokenizer, grammars)
    for schema in ({"type": "string", "pattern": pattern}, {"type": "string", "pattern": pattern, "maxLength": 9}):
        admitted = [text for text in (*good, *bad) if walker.admits(schema_grammar(schema), json.dumps(text))]
        assert admitted == [text for text in good if text.isascii()]
        assert all(walker.admits(schema_grammar(schema), json.dumps(text, ensure_ascii=False)) for text in good)


@pytest.mark.parametrize(
    ("bounds", "good", "bad"),
    [
        ({"exclusiveMinimum": 0, "maximum": 0.5}, ["0.1", "0.000001", "0.5"], ["0", "0.0", "-0", "0.6"]),
        ({"minimum": -0.5, "exclusiveMaximum": 0.0}, ["-0.1", "-0.5"], ["0", "-0", "-0.0", "-0.6"]),
        ({"exclusiveMinimum": 9, "exclusiveMaximum": 9.5}, ["9.1", "9.0000001"], ["9", "9.0", "9.5"]),
        ({"exclusiveMinimum": -2.5, "exclusiveMaximum": -2}, ["-2.1", "-2.49"], ["-2", "-2.0", "-2.5"]),
        ({"exclusiveMinimum": 1, "maximum": 12}, ["1.1", "2", "12"], ["1", "1.0", "12.1"]),
        ({"minimum": 0, "exclusiveMaximum": 1}, ["0.9", "0.99", "0"], ["1", "1.0"]),
        ({"exclusiveMinimum": -10}, ["-9.9", "-9", "5"], ["-10", "-10.0", "-10.1"]),
        ({"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 3}, ["1", "2"], ["0", "3", "1.5"]),
    ],
)
def test_an_exclusive_bound_is_excluded(
    grammars: Grammars, tokenizer: Tokenizer, bounds: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    """Regression: where both bounds have the same integer part, a bound that is whole passed."""
    walker = Walker(tokenizer, grammars)
    apart = {"allOf": [{"type": "number"}, *({keyword: value} for keyword, value in bounds.items())]}
    for schema in ({"type": "number", **bounds}, apart):
        assert [text for text in (*good, *bad) if walker.admits(schema_grammar(schema), text)] == good


def test_a_flag_makes_a_bound_exclusive(grammars: Grammars, tokenizer: Tokenizer) -> None:
    """As in draft 4 and OpenAPI 3.0. Regression: where both bounds have one integer part, a whole one passed."""
    walker = Walker(tokenizer, grammars)
    above = schema_grammar({"type": "number", "minimum": 0, "exclusiveMinimum": True, "maximum": 0.5})
    assert [text for text in ("0", "0.0", "0.1", "0.5", "0.6") if walker.admits(above, text)] == ["0.1", "0.5"]
    below = schema_grammar({"allOf": [{"maximum": 0, "exclusiveMaximum": True}, {"type": "number", "minimum": -0.5}]})
    assert [text for text in ("0", "-0", "-0.1", "-0.5") if walker.admits(below, text)] == ["-0.1", "-0.5"]
    no_flag = schema_grammar({"type": "integer", "minimum": 1, "exclusiveMinimum": False, "maximum": 3})
    assert [text for text in ("0", "1", "3", "4") if walker.admits(no_flag, text)] == ["1", "3"]


@pytest.mark.parametrize(
    ("bounds", "step", "good", "bad"),
    [
        ({"minimum": -10, "maximum": 10}, 0.01, ["-0.50", "0.50", "0", "-10", "9.99", "-9.90"], ["10.01", "-10.01"]),
        ({"maximum": 0}, 0.25, ["-0.50", "-1", "0"], ["0.25", "0.50"]),
        ({"minimum": 0, "exclusiveMaximum": 10}, 0.01, ["9.99", "9.90", "0", "0.01"], ["10", "-0.01"]),
        ({"exclusiveMinimum": -2.62, "exclusiveMaximum": 2.62}, 0.25, ["2.50", "-2.50", "-0.50"], ["2.75", "-2.75"]),
        ({"exclusiveMaximum": 2.62}, 0.25, ["2.50", "-0.50", "-7"], ["2.75"]),
        ({"minimum": 0.45, "maximum": 0.55}, 0.1, ["0.5"], ["0.4", "0.6"]),
        ({"minimum": 100, "exclusiveMinimum": True}, 0.25, ["100.25", "100.50"], ["100", "100.00"]),
        ({"maximum": 12.75}, 5, ["10", "-5"], ["15", "12"]),
        ({"exclusiveMaximum": 3, "minimum": 1}, 1, ["1", "2"], ["0", "3"]),
    ],
)
def test_every_multiple_within_bounds_can_be_written(
    grammars: Grammars, tokenizer: Tokenizer, bounds: dict[str, Any], step: float, good: list[str], bad: list[str]
) -> None:
    """Regression: bounds wanted another number of places than multiples have, so -0.50 and 9.99 were missing."""
    walker = Walker(tokenizer, grammars)
    grammar = schema_grammar({"type": "number", **bounds, "multipleOf": step})
    assert [text for text in (*good, *bad) if walker.admits(grammar, text)] == good


def test_multiples_of_different_places_need_not_meet(grammars: Grammars, tokenizer: Tokenizer) -> None:
    multiples = (0.01, 0.5, 7, 60, 100, 1024, 10_000)
    grammar = schema_grammar(
        {"type": "array", "prefixItems": [{"multipleOf": one, "type": "number"} for one in multiples]}
    )
    assert Walker(tokenizer, grammars).admits(grammar, "[0.03,1.5,14,120,300,2048,20000]")
    joined = schema_grammar({"allOf": [{"multipleOf": 0.06}, {"multipleOf": 5}, {"type": "number"}]})
    admitted = [text for text in ("15", "30", "5", "0.06") if Walker(tokenizer, grammars).admits(joined, text)]
    assert admitted == ["15", "30"]


@pytest.mark.parametrize(
    "name", ["\u00e9\u4f60", "a b", "List[int]", "A<B>", "a%b", "a%41", "a#b", 'a"b', "~a/b", "a^b", "$x"]
)
@pytest.mark.parametrize("is_quoted", [True, False])
def test_a_reference_may_name_any_definition(
    grammars: Grammars, tokenizer: Tokenizer, name: str, is_quoted: bool
) -> None:
    """Regression: the compiler refused what is no URI, such as names that are not ASCII."""
    pointer = name.replace("~", "~0").replace("/", "~1")
    reference = quote(pointer) if is_quoted or "%41" in name else pointer
    grammar = schema_grammar({"$defs": {name: {"type": "boolean"}}, "$ref": f"#/$defs/{reference}"})
    assert {*_answers(grammars, tokenizer, grammar)} == {"true", "false"}


@pytest.mark.parametrize(
    ("reference", "place"),
    [
        ("#/properties/place/oneOf/1", {"oneOf": [{"type": "string"}, {"type": "boolean"}]}),
        (
            "#/properties/place/oneOf/0/oneOf/1/items",
            {"oneOf": [{"oneOf": [{"type": "string"}, {"type": "array", "items": {"type": "boolean"}}]}]},
        ),
        ("#/properties/place/patternProperties/%5E%5Bab%5D", {"patternProperties": {"^[ab]": {"type": "boolean"}}}),
    ],
)
def test_a_reference_may_lead_to_what_was_rewritten(
    grammars: Grammars, tokenizer: Tokenizer, reference: str, place: Any
) -> None:
    """Regression: a oneOf that is written as anyOf, and patterns, were not found at their old places."""
    properties = {"a": {"$ref": reference}, "place": place}
    grammar = schema_grammar({"type": "object", "properties": properties, "required": ["a"]})
    walker = Walker(tokenizer, grammars)
    assert walker.admits(grammar, '{"a":true}')
    assert not walker.admits(grammar, '{"a":"text"}')


@pytest.mark.parametrize(
    ("pattern", "good", "bad"),
    [
        ("^[[a]]$", ["a]", "[]"], ["a", "[", "]"]),
        (r"^[^[\]]+$", ["a", "("], ["[", "a]"]),
        ("[[a]", ["a", "["], ["b", "]"]),
        ("^[a&&b]$", ["a", "b", "&"], ["c"]),
        ("^[a~~b]$", ["a", "b", "~"], ["c"]),
        ("^[+--]$", ["+", ",", "-"], ["*", "."]),
        ("^[--/]$", ["-", ".", "/"], [",", "0"]),
        (r"^[\w-.]+$", ["a-.", "_"], [",", "/"]),
        (r"^[\s--/]$", [" ", "-", "/"], ["."]),
        (r"^[a\-c]$", ["a", "-", "c"], ["b"]),
        (r"^[\x41-\u0043]$", ["A", "B", "C"], ["D", "4", "-"]),
    ],
)
def test_a_class_means_what_it_means_in_javascript(
    grammars: Grammars, tokenizer: Tokenizer, pattern: str, good: list[str], bad: list[str]
) -> None:
    """Regression: Rust has nested classes, intersections and differences, so it admits other texts or refuses."""
    walker = Walker(tokenizer, grammars)
    grammar = schema_grammar({"type": "string", "pattern": pattern})
    assert [text for text in (*good, *bad) if walker.admits(grammar, json.dumps(text))] == good


@pytest.mark.parametrize("pattern", ["[", "a[^", '^[^"', r"\p", r"\p{", "[[a", "[b-a]"])
def test_a_broken_pattern_is_refused(grammars: Grammars, pattern: str) -> None:
    with pytest.raises(InvalidRequestError, match="regex parse error"):
        grammars.compiled(schema_grammar({"type": "string", "pattern": pattern}))


def test_depth_is_limited_before_anything_recurses() -> None:
    schema: Any = True
    for _ in range(100_000):
        schema = {"items": schema}
    with pytest.raises(InvalidRequestError, match=f"more than {MAX_SCHEMA_DEPTH} deep"):
        schema_grammar(schema)
    loop: dict[str, Any] = {}
    loop["items"] = loop
    with pytest.raises(InvalidRequestError, match="deep"):
        schema_grammar(loop)


def test_deepest_and_most_references_compile(grammars: Grammars) -> None:
    schema: Any = {"type": "boolean"}
    for _ in range(MAX_SCHEMA_DEPTH // 2 - 2):
        schema = {"items": schema, "type": "array"}
    grammars.compiled(schema_grammar(schema))
    names = [f"d{index}" for index in range(MAX_SCHEMA_REFERENCES)]
    chain = {name: {"properties": {"a": {"$ref": f"#/$defs/{after}"}}} for name, after in pairwise(names)}
    grammars.compiled(schema_grammar({"$defs": {**chain, names[-1]: {"type": "string"}}, "$ref": "#/$defs/d0"}))
    longer = {**chain, names[-1]: {"$ref": "#/$defs/more"}, "more": True}
    with pytest.raises(InvalidRequestError, match=f"at most {MAX_SCHEMA_REFERENCES}"):
        schema_grammar({"$defs": longer, "$ref": "#/$defs/d0"})


def test_white_space_between_json_tokens_has_an_end(grammars: Grammars, tokenizer: Tokenizer) -> None:
    """Without it a model that likes blanks writes them until its tokens are spent."""
    matcher = grammars.matcher(json_object_grammar())
    space = tokenizer.encode(" ")[0]
    assert matcher.consume(tokenizer.encode("{"))
    num_spaces = 0
    while num_spaces < 100 and space in allowed_ids(grammars, matcher):
        assert matcher.consume([space])
        num_spaces += 1
    assert num_spaces == 32


@pytest.mark.parametrize("pattern", ["[ab]{2,5}c", "^[0-9]+$", "a/b|c", r"\/x", "line\nend", "(?i)yes", "é+", ""])
def test_a_regex_holds_for_the_whole_answer(grammars: Grammars, tokenizer: Tokenizer, pattern: str) -> None:
    for answer in _answers(grammars, tokenizer, regex_grammar(pattern)):
        assert re.fullmatch(pattern, answer), answer


def test_a_choice_is_one_of_its_texts_and_every_one_is_met(grammars: Grammars, tokenizer: Tokenizer) -> None:
    choices = ["yes", "no", "", 'a"quote', "line\nend", "tab\t\\", "DEL\x7f", "😀 é", "yes"]
    assert set(_answers(grammars, tokenizer, choice_grammar(choices), 200)) == set(choices)


def test_a_lark_grammar(grammars: Grammars, tokenizer: Tokenizer) -> None:
    source = 'start: (WORD ",")* WORD\nWORD: /[a-z]{1,3}/\n'
    for answer in _answers(grammars, tokenizer, lark_grammar(source)):
        assert re.fullmatch("([a-z]{1,3},)*[a-z]{1,3}", answer)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("start: missing\n", "missing"),
        ("start[temperature=0.5]: /a/\n", "temperature"),
        ("?start [temperature = 0.5]: /a/\n", "temperature"),
        ('start: one\none[stop="]", temperature=0.5]: /a/\n', "temperature"),
        ('start: %lark { start[temperature=0.5]: "a"\n}', "temperature"),
        ("a" * (MAX_LARK_CHARACTERS + 1), "characters"),
        ('{"grammars": []}', "1\\(1\\)"),
        ("", "start"),
        ('start: %json {"not": {}, "x-guidance": {"lenient": true}}\n', "not"),
    ],
    ids=lambda part: part[:40],
)
def test_lark_that_cannot_be_honoured_is_refused(grammars: Grammars, source: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        grammars.compiled(lark_grammar(source))


def test_a_grammar_may_speak_of_temperatures(grammars: Grammars, tokenizer: Tokenizer) -> None:
    source = '# [temperature=1]\nstart: "a[temperature=" temperature // temperature=\ntemperature: /[temperature=]/\n'
    for answer in _answers(grammars, tokenizer, lark_grammar(source)):
        assert answer.startswith("a[temperature=")


MANY_CONSTANTS: list[dict[str, Any]] = [
    {"type": "object", "properties": {"kind": {"const": str(number)}}, "required": ["kind"]} for number in range(2000)
]
CHAIN: dict[str, Any] = {f"d{number}": {"$ref": f"#/$defs/d{number + 1}"} for number in range(90)}


LARGE: list[Any] = [
    {"oneOf": MANY_CONSTANTS},
    {"$defs": {**CHAIN, "d90": MANY_CONSTANTS[0]}, "oneOf": [{"$ref": "#/$defs/d0"}] * 10_000},
    {
        "$defs": {"one": {**MANY_CONSTANTS[0], "properties": {"kind": {"enum": [str(n) for n in range(10_000)]}}}},
        "anyOf": [{"oneOf": [{"$ref": "#/$defs/one"}, {"$ref": "#/$defs/one"}]}] * 2500,
    },
]


@pytest.mark.parametrize("schema", LARGE, ids=["many constants", "a long chain", "large enumerations"])
def test_large_schemas_are_written_down_quickly(schema: Any) -> None:
    begun_s = time.process_time()
    schema_grammar(schema)
    assert time.process_time() - begun_s < 1.0


def test_options_past_the_comparison_are_left_to_the_compiler(grammars: Grammars) -> None:
    two = [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]
    kinds: Any = A_OR_B["$defs"]
    large = {"type": "object", "properties": {"kind": {"enum": [str(number) for number in range(20_000)]}}}
    schema = {
        "$defs": {**kinds, "large": {**large, "required": ["kind"]}},
        "prefixItems": [*[{"oneOf": [{"$ref": "#/$defs/large"}]}] * 4, {"oneOf": two}],
    }
    with pytest.raises(InvalidRequestError, match="use anyOf"):
        grammars.compiled(schema_grammar(schema))


@pytest.mark.parametrize(
    "source",
    ["\n" * 40_000 + 'start: "a"', "a[" * 30_000, '"\\' * 30_000, "/\\" * 30_000, "temperature " * 5000, "<" * 60_000],
    ids=lambda source: source[:4],
)
def test_lark_is_looked_through_once(source: str) -> None:
    begun_s = time.process_time()
    lark_grammar(source)
    assert time.process_time() - begun_s < 1.0


def test_limits_of_the_other_builders() -> None:
    for pattern in (None, 3, "a" * (MAX_REGEX_CHARACTERS + 1), "\ud800", "a\\", "a\\\\\\"):
        with pytest.raises(InvalidRequestError, match="regex"):
            regex_grammar(pattern)  # type: ignore[arg-type]
    for choices in ([], ["a"] * (MAX_CHOICES + 1), "text", [1], ["\ud800"], ["x" * 2**17] * 3):
        with pytest.raises(InvalidRequestError, match="choice"):
            choice_grammar(choices)  # type: ignore[arg-type]
