"""Keyword arguments as Python's own reader sees them."""

import ast
import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.gateway.parsing.literals import arguments_as_json
from tandem.gateway.parsing.source import Malformed

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(VALUES)
def test_reads_what_python_writes(value: object) -> None:
    assert json.loads(arguments_as_json(f"(a={value!r})", ()))["a"] == ast.literal_eval(repr(value)) == value


@given(VALUES)
def test_reads_what_json_writes(value: object) -> None:
    for text in (json.dumps(value), json.dumps(value, ensure_ascii=False)):
        assert json.loads(arguments_as_json(f"(a={text})", ()))["a"] == value


@given(st.text(alphabet="()[]{}'\"\\a=1,:.-uxUN \n", max_size=30))
def test_never_raises_anything_else(text: str) -> None:
    with contextlib.suppress(Malformed):
        json.loads(arguments_as_json(text, ("p",))).keys()


@pytest.mark.parametrize(
    "text", ["(a=1", "a=1)", "(a=)", "(a=1)x", "(=1)", "(a={1: 2})", "(a=0x1f)", "(a=1_0)", "(a=b)"]
)
def test_refuses(text: str) -> None:
    with pytest.raises(Malformed):
        arguments_as_json(text, ())
