"""Sampling options are refused at construction, by name and value, or can be honoured."""

import math
import pickle
from typing import Any

import pytest

from tandem.core.errors import InvalidRequestError
from tandem.core.reasoning import Reasoning
from tandem.core.sampling_params import MAX_GRAMMAR_CHARACTERS, MAX_LIST_TOKENS, SamplingParams, validate_for_vocab


def test_defaults_are_plain_sampling() -> None:
    params = SamplingParams()
    assert not params.is_greedy
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (1.0, 0, 1.0, 0.0)
    assert SamplingParams(temperature=0).is_greedy


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("min_tokens", -1),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "1"),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("min_p", -0.01),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 1e-40),
        ("repetition_penalty", 0.009),
        ("repetition_penalty", 101.0),
        ("presence_penalty", math.nan),
        ("frequency_penalty", 1000.0),
        ("grammar", ""),
        ("grammar", 3),
        ("grammar", "a" * (MAX_GRAMMAR_CHARACTERS + 1)),
        ("reasoning", (1, 2)),
        ("skip_special_tokens", 1),
        ("speculate", "medusa"),
        ("speculate", ["ngram"]),
        ("logit_bias", {-1: 0.0}),
        ("logit_bias", {1: math.inf}),
        ("logit_bias", {"1": 0.0}),
        ("allowed_token_ids", ()),
        ("allowed_token_ids", (-5,)),
        ("bad_words", ((),)),
        ("bad_words", ((1, -2),)),
        ("bad_words", (tuple(range(MAX_LIST_TOKENS)), (1,))),
        ("seed", 2**64),
        ("seed", 1.0),
        ("n", 0),
        ("logprobs", -1),
        ("logprobs", 10**6),
        ("prompt_logprobs", 10**6),
        ("stop", ("",)),
        ("stop", "abc"),
        ("stop", (5,)),
        ("stop", ("x" * 100_000,)),
        ("stop", ("x",) * 1000),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", (2**31,)),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError, match=field.split("_")[0]):
        SamplingParams(**{field: value})


def test_min_tokens_may_not_exceed_max_tokens() -> None:
    assert SamplingParams(min_tokens=3, max_tokens=3).min_tokens == 3
    with pytest.raises(InvalidRequestError, match="min_tokens=4 exceeds max_tokens=3"):
        SamplingParams(min_tokens=4, max_tokens=3)


@pytest.mark.parametrize("option", [{"ignore_eos": True}, {"min_tokens": 1}])
def test_a_grammar_says_the_end_itself(option: dict[str, Any]) -> None:
    assert SamplingParams(grammar="start: /a/").grammar == "start: /a/"
    with pytest.raises(InvalidRequestError, match="says the end"):
        SamplingParams(grammar="start: /a/", **option)


def test_params_cross_processes() -> None:
    params = SamplingParams(logit_bias={1: 2.0}, bad_words=((1, 2),), stop=("\n",))
    assert pickle.loads(pickle.dumps(params)) == params


@pytest.mark.parametrize(
    ("field", "inside", "outside"),
    [
        ("logit_bias", {99: 1.0}, {99: 1.0, 100: 1.0}),
        ("allowed_token_ids", (0, 99), (0, 100)),
        ("stop_token_ids", (99,), (100,)),
        ("bad_words", ((99,), (1, 99)), ((99,), (1, 100, 2))),
        ("reasoning", Reasoning((1,), (99,)), Reasoning((100,), (99,))),
        ("reasoning", Reasoning((1,), (99,)), Reasoning((), (99, 100))),
    ],
)
def test_token_ids_beyond_the_vocabulary_are_refused(field: str, inside: Any, outside: Any) -> None:
    validate_for_vocab(SamplingParams(**{field: inside}), 100)
    with pytest.raises(InvalidRequestError, match=f"{field} names token 100"):
        validate_for_vocab(SamplingParams(**{field: outside}), 100)
