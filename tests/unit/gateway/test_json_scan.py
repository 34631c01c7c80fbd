"""Values of a JSON text are counted before it is parsed, in whatever pieces it comes."""

import json
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.gateway.json_scan import JsonScan

SCALARS = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(st.characters(codec="utf-8"), max_size=8)
TRICKY = st.text(st.sampled_from('\\",:{}[]"n é'), max_size=12)
VALUES = st.recursive(
    SCALARS | TRICKY,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TRICKY, inner, max_size=5),
    max_leaves=30,
)


def count(value: Any) -> tuple[int, int, int]:
    """(Entries and members, members, containers) of a parsed text."""
    if not isinstance(value, (dict, list)):
        return 0, 0, 0
    inner = [count(item) for item in (value.values() if isinstance(value, dict) else value)]
    values, members, containers = (sum(part) for part in zip(*inner, strict=True)) if inner else (0, 0, 0)
    return values + len(value), members + (len(value) if isinstance(value, dict) else 0), containers + 1


def scanned(text: bytes, piece: int) -> JsonScan:
    scan = JsonScan()
    for start in range(0, len(text), piece):
        scan.feed(text[start : start + piece])
    return scan


@given(VALUES, st.integers(1, 9), st.booleans())
def test_it_counts_what_parsing_makes(value: Any, piece: int, is_ascii: bool) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii).encode()
    num_values, num_members, num_containers = count(orjson.loads(text))
    scan = scanned(text, piece)
    assert scan.num_members == num_members + num_containers
    assert num_values <= scan.num_values <= num_values + num_containers


@given(VALUES, st.integers(30, 300), st.sampled_from([(), ("\\",), ('"',), ("\\" * 7,), ('\\"' * 3,)]))
def test_few_quotes_in_long_texts_are_counted_the_same(value: Any, piece: int, ends: tuple[str, ...]) -> None:
    """A text of few quotes is looked at where it has quotes; the others are replaced whole."""
    text = json.dumps([value, *("x" * 5000 + end for end in ends), "y" * 5000]).encode()
    num_values, num_members, num_containers = count(orjson.loads(text))
    for size in (piece, len(text)):
        scan = scanned(text, size)
        assert scan.num_members == num_members + num_containers
        assert num_values <= scan.num_values <= num_values + num_containers


@pytest.mark.parametrize("text", [b'{"a": 1', b'"\\', b"}}}", b"\\\\\\", b'""""', b"\xff\xfe,", b"[" * 5000])
def test_what_is_no_json_is_counted_all_the_same(text: bytes) -> None:
    whole = scanned(text, len(text))
    apart = scanned(text, 1)
    assert (whole.num_values, whole.num_members) == (apart.num_values, apart.num_members)
