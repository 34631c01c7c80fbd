"""Fields become `SamplingParams` with the model's defaults under them, and choices get seeds of their own."""

from typing import Any

import pytest

from tandem.core.errors import InvalidRequestError
from tandem.core.sampling_params import SamplingParams
from tandem.gateway.openai.fields import GenerateBody
from tandem.gateway.openai.sampling import read_params
from tandem.text.tokenizer import Tokenizer
from tests.helpers.fake_backend import model_info
from tests.helpers.tokenizers import write_byte_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_byte_tokenizer(tmp_path_factory.mktemp("model")))


def params(tokenizer: Tokenizer, defaults: dict[str, float] | None = None, **fields: Any) -> SamplingParams:
    body = GenerateBody.model_validate({"model": "m", **fields})
    return read_params(body, model_info(1, defaults), tokenizer, max_tokens=5, logprobs=None)


def test_zero_is_said_and_null_is_not(tokenizer: Tokenizer) -> None:
    defaults = {"temperature": 0.7, "top_p": 0.8, "top_k": 20.0}
    defaults["top_k"] = 20
    said = params(tokenizer, defaults, temperature=0.0, top_p=None, seed=0)
    assert (said.temperature, said.top_p, said.top_k, said.seed) == (0.0, 0.8, 20, 0)


def test_bad_words_are_banned_at_the_start_and_after_a_space(tokenizer: Tokenizer) -> None:
    banned = params(tokenizer, bad_words=["no"]).bad_words
    assert set(banned) == {tuple(tokenizer.encode(text, add_special_tokens=False)) for text in ("no", " no")}


def test_bad_words_are_encoded_no_further_than_they_can_be_banned(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [f"{number:04}" * 100 for number in range(4096)]
    encode, encoded = tokenizer.encode, []

    def counted(text: str, **options: Any) -> list[int]:
        encoded.append(text)
        return encode(text, **options)

    monkeypatch.setattr(tokenizer, "encode", counted)
    with pytest.raises(InvalidRequestError, match="bad_words has more than 4096 tokens"):
        params(tokenizer, bad_words=words)
    assert len(encoded) < 30
    encoded.clear()
    assert len(params(tokenizer, bad_words=["no"] * 4096).bad_words) == 2
    assert len(encoded) == 2


@pytest.mark.parametrize(
    "fields",
    [
        {"bad_words": [" "]},
        {"logit_bias": {"-1": 1}},
        {"logit_bias": {"1.5": 1}},
        {"logit_bias": {"999999": 1}},
        {"stop": [""]},
        {"n": 0},
        {"temperature": float("nan")},
        {"stop_token_ids": [100000]},
    ],
)
def test_nonsense_is_refused(tokenizer: Tokenizer, fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError):
        params(tokenizer, **fields)
