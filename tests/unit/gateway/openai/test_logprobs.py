"""Probabilities in OpenAI's shapes: bytes that are no text are spelled out, infinities are not sent."""

import math
from pathlib import Path

import pytest

from tandem.core.types import TokenLogprobs
from tandem.gateway.openai.logprobs import (
    LEAST_LOGPROB,
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
    token_text,
)
from tandem.text.tokenizer import Tokenizer
from tests.helpers.tokenizers import write_byte_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path: Path = tmp_path_factory.mktemp("model")
    return Tokenizer.load(write_byte_tokenizer(path))


def test_a_byte_that_is_no_text_is_spelled_out(tokenizer: Tokenizer) -> None:
    (first, _) = tokenizer.encode("é", add_special_tokens=False)
    assert token_text(tokenizer, first) == "bytes:\\xc3"
    entry = chat_logprobs(tokenizer, [TokenLogprobs(first, -1.0, 1)], 0)["content"][0]
    assert (entry["bytes"], entry["top_logprobs"]) == ([0xC3], [])


def test_the_chosen_token_is_among_the_top_and_infinity_is_not_sent(tokenizer: Tokenizer) -> None:
    a, b, c = tokenizer.encode("abc", add_special_tokens=False)
    entry = TokenLogprobs(c, -math.inf, 9, ((a, -0.1), (b, -3.0)))
    value = completion_logprobs(tokenizer, [a, c], [None, entry], 7)
    assert value["top_logprobs"] == [None, {"a": -0.1, "b": -3.0, "c": LEAST_LOGPROB}]
    assert value["text_offset"] == [7, 8]
    ranked = prompt_logprobs(tokenizer, [None, entry])
    assert ranked[0] is None
    assert ranked[1] is not None
    assert {key: found["rank"] for key, found in ranked[1].items()} == {str(a): 1, str(b): 2, str(c): 9}
    assert len(chat_logprobs(tokenizer, [entry], 1)["content"][0]["top_logprobs"]) == 1
