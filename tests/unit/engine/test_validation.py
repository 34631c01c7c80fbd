"""Requests refused before the engine touches them, in the order that costs least."""

from array import array

import pytest

from tandem.core.errors import InvalidRequestError
from tandem.core.sampling_params import SamplingParams
from tandem.core.scope import CacheScope
from tandem.engine.validation import (
    MAX_NAME_CHARACTERS,
    check_drafter,
    check_params,
    check_request_id,
    check_scope,
    encode_prompt,
)
from tandem.scheduler.request import WHOLE, Handoff


def test_token_ids_are_copied() -> None:
    prompt = [1, 2]
    token_ids = encode_prompt(prompt, None, 10, 8)
    prompt.append(99)
    assert token_ids.tolist() == [1, 2]
    assert encode_prompt(range(3), None, 10, 8).tolist() == [0, 1, 2]
    assert encode_prompt((4,), None, 10, 8).tolist() == [4]


def test_packed_token_ids_are_taken_as_they_are() -> None:
    """They come from the wire, up to a million of them; nobody else has them."""
    packed = array("I", (1, 9))
    assert encode_prompt(packed, None, 10, 8) is packed
    with pytest.raises(InvalidRequestError, match="prompt token 10 is not an id from 0 to 9"):
        encode_prompt(array("I", (1, 10)), None, 10, 8)
    with pytest.raises(InvalidRequestError, match="prompt token -1 is not"):
        encode_prompt(array("i", (1, -1)), None, 10, 8)


def test_length_is_checked_before_anything_is_copied() -> None:
    with pytest.raises(InvalidRequestError, match="room for at most 7"):
        encode_prompt(range(10**15), None, 10, 8)
    assert len(encode_prompt([1] * 7, None, 10, 8)) == 7


def test_text_needs_a_tokenizer() -> None:
    with pytest.raises(InvalidRequestError, match="no tokenizer"):
        encode_prompt("abc", None, 10, 8)
    with pytest.raises(InvalidRequestError, match="no tokenizer"):
        check_params(SamplingParams(stop=("a",)), None, 10)


def test_a_request_id_is_short_text() -> None:
    check_request_id("x" * MAX_NAME_CHARACTERS)
    for wrong in ("", "x" * (MAX_NAME_CHARACTERS + 1), None, 5):
        with pytest.raises(InvalidRequestError, match="must be text"):
            check_request_id(wrong)


@pytest.mark.parametrize("wrong", [None, "tenant", CacheScope(adapter=b"a" * 32)])
def test_a_scope_whose_state_cannot_be_computed_is_refused(wrong: object) -> None:
    check_scope(CacheScope(salt="tenant"))
    with pytest.raises(InvalidRequestError, match="scope"):
        check_scope(wrong)


@pytest.mark.parametrize("choice", [None, "off", "auto", "ngram"])
def test_a_drafter_that_there_is_may_be_named(choice: str | None) -> None:
    check_drafter(SamplingParams(speculate=choice), WHOLE, "ngram")


@pytest.mark.parametrize(
    ("drafter", "remedy"),
    [(None, "with no drafter; use off or auto"), ("ngram", "with the drafter 'ngram'; use off or auto or ngram")],
)
def test_another_drafter_is_refused_by_name_unless_the_answer_has_begun(drafter: str | None, remedy: str) -> None:
    """An answer that another worker began must not end with an error; its tokens are the same without drafts."""
    params = SamplingParams(speculate="suffix")
    with pytest.raises(InvalidRequestError, match="speculate='suffix' is not available") as refused:
        check_drafter(params, WHOLE, drafter)
    assert remedy in str(refused.value)
    check_drafter(params, Handoff(output_token_ids=(5,)), drafter)
