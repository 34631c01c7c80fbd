"""Choices get names and seeds of their own, and are counted before anything is encoded."""

import pytest

from tandem.core.errors import InvalidRequestError
from tandem.core.fresh_numbers import FreshNumbers
from tandem.core.randomness import choice_seed
from tandem.core.sampling_params import SamplingParams
from tandem.gateway.choices import check_num_choices, expected_output, make_choices


def test_each_choice_of_each_prompt_has_its_seed_and_name() -> None:
    choices = make_choices("r", [[1], [2, 3]], SamplingParams(n=2, seed=7), FreshNumbers())
    assert [choice.request_id for choice in choices] == ["r/0", "r/1", "r/2", "r/3"]
    assert [choice.params.seed for choice in choices] == [7, choice_seed(7, 1)] * 2
    assert [tuple(choice.prompt_token_ids) for choice in choices] == [(1,), (1,), (2, 3), (2, 3)]
    assert {choice.params.n for choice in choices} == {1}
    (single,) = make_choices("r", [[1]], SamplingParams(), FreshNumbers())
    assert single.request_id == "r"
    assert single.params.seed is not None


def test_equal_prompts_without_a_seed_have_answers_of_their_own() -> None:
    """Regression: every prompt of a list had the same seeds, so the same prompt twice gave the same answer twice."""
    choices = make_choices("r", [[1, 2]] * 3, SamplingParams(n=2), FreshNumbers())
    assert len({choice.params.seed for choice in choices}) == 6


def test_answers_are_counted_before_anything_is_encoded() -> None:
    check_num_choices(4, 2, 8)
    with pytest.raises(InvalidRequestError, match="more than 8"):
        check_num_choices(5, 2, 8)


@pytest.mark.parametrize(
    ("max_tokens", "ignore_eos", "expected"),
    [(None, False, 256), (9, False, 9), (5000, False, 256), (5000, True, 5000)],
)
def test_an_answers_length_is_guessed(max_tokens: int | None, ignore_eos: bool, expected: int) -> None:
    assert expected_output(SamplingParams(max_tokens=max_tokens, ignore_eos=ignore_eos)) == expected
