"""Bytes on the wire are those of earlier releases, and theirs are read as they were meant.

`recorded_bytes.json` was written by the release that speaks protocol 2. A field that is added makes its bytes longer;
the old ones must be read all the same, so a new record goes beside an old one and replaces none.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tandem.rpc.form import Form
from tests.unit.rpc.examples import EXAMPLES

RECORDED: dict[str, str] = json.loads((Path(__file__).parent / "recorded_bytes.json").read_text())
FORMS = [
    pytest.param(f"{method.name}-{side}", form, value, id=f"{method.name}-{side}")
    for method, values in EXAMPLES.items()
    for side, form, value in zip(("request", "answer"), (method.request, method.answer), values, strict=True)
]
UNKNOWN_FIELD = b"\xfa\xff\xff\xff\x0f\x03new"  # field 536870911, of which no release knows


@pytest.mark.parametrize(("name", "form", "value"), FORMS)
def test_bytes_are_those_of_earlier_releases(name: str, form: Form[Any], value: Any) -> None:
    assert form.encode(value).hex() == RECORDED[name]


@pytest.mark.parametrize(("name", "form", "value"), FORMS)
def test_bytes_of_earlier_and_later_releases_are_read(name: str, form: Form[Any], value: Any) -> None:
    recorded = bytes.fromhex(RECORDED[name])
    assert form.decode(recorded) == value
    assert form.decode(recorded + UNKNOWN_FIELD) == value


def test_every_recorded_message_has_an_example() -> None:
    assert RECORDED.keys() == {f"{method.name}-{side}" for method in EXAMPLES for side in ("request", "answer")}
