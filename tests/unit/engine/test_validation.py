"""Requests refused before the engine touches them, in the order that costs least."""

import pytest

from tandem.core.errors import InvalidRequestError
from tandem.core.sampling_params import SamplingParams
from tandem.engine.validation import MAX_NAME_CHARACTERS, check_names, check_params, encode_prompt


def test_token_ids_are_copied() -> None:
    prompt = [1, 2]
    token_ids = encode_prompt(prompt, None, 10, 8)
    prompt.append(99)
    assert token_ids == [1, 2]
    assert encode_prompt(range(3), None, 10, 8) == [0, 1, 2]
    assert encode_prompt((4,), None, 10, 8) == [4]


def test_length_is_checked_before_anything_is_copied() -> None:
    with pytest.raises(InvalidRequestError, match="room for at most 7"):
        encode_prompt(range(10**15), None, 10, 8)
    assert len(encode_prompt([1] * 7, None, 10, 8)) == 7


def test_text_needs_a_tokenizer() -> None:
    with pytest.raises(InvalidRequestError, match="no tokenizer"):
        encode_prompt("abc", None, 10, 8)
    with pytest.raises(InvalidRequestError, match="no tokenizer"):
        check_params(SamplingParams(stop=("a",)), None, 10)


def test_names_are_short_text() -> None:
    check_names("x" * MAX_NAME_CHARACTERS, "")
    for names in (("", ""), ("x" * (MAX_NAME_CHARACTERS + 1), ""), ("a", None), ("a", 5)):
        with pytest.raises(InvalidRequestError, match="must be text"):
            check_names(*names)
