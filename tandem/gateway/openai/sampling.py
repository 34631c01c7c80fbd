"""Translates OpenAI's sampling fields and the engine extensions beside them to `SamplingParams`."""

from collections.abc import Mapping, Sequence
from typing import Any

from tandem.core.errors import shown
from tandem.core.sampling_params import MAX_LIST_TOKENS, SamplingParams, validate_for_vocab
from tandem.gateway.errors import RequestError
from tandem.gateway.openai.fields import GenerateBody
from tandem.rpc.messages import ModelInfo
from tandem.text.tokenizer import Tokenizer

_SAME_NAME = (
    "min_tokens",
    "temperature",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "n",
    "include_stop_str_in_output",
    "ignore_eos",
    "prompt_logprobs",
    "skip_special_tokens",
    "speculate",
)


def read_params(
    body: GenerateBody, info: ModelInfo, tokenizer: Tokenizer, *, max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    """Sampling parameters: fields of the request, else the model's defaults, else ours. `seed` may still be None.

    Raises:
        InvalidRequestError: naming the field that cannot be honoured.
    """
    own: dict[str, Any] = {name: getattr(body, name) for name in _SAME_NAME}
    own |= {"max_tokens": max_tokens, "logprobs": logprobs, "top_k": 0 if body.top_k == -1 else body.top_k}
    own["stop"] = (body.stop,) if isinstance(body.stop, str) else body.stop
    own["stop_token_ids"] = body.stop_token_ids
    own["allowed_token_ids"] = body.allowed_token_ids
    own["logit_bias"] = None if body.logit_bias is None else _logit_bias(body.logit_bias)
    own["bad_words"] = None if body.bad_words is None else _bad_words(body.bad_words, tokenizer)
    params = SamplingParams(**{**info.sampling_defaults, **{k: v for k, v in own.items() if v is not None}})
    validate_for_vocab(params, info.vocab_size)
    return params


def _logit_bias(given: Mapping[str, float]) -> dict[int, float]:
    """Bias by token id; JSON has only text for keys."""
    for key in given:
        if not (key.isascii() and key.isdecimal() and len(key) < 11):
            raise RequestError(f"logit_bias key {shown(key)} is not a token id", param="logit_bias")
    return {int(key): bias for key, bias in given.items()}


def _bad_words(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Token ids of each word at the start of a text and after a space."""
    if len(words) > MAX_LIST_TOKENS:
        raise RequestError(f"bad_words has {len(words)} entries; at most {MAX_LIST_TOKENS}", param="bad_words")
    for word in words:
        if not word.strip() or len(word) > 1024:
            raise RequestError(f"bad_words holds {shown(word)}; give short words", param="bad_words")
    found: dict[tuple[int, ...], None] = {}
    num_tokens = 0
    for spelled in dict.fromkeys(spelled for word in words for spelled in (word, " " + word.lstrip())):
        token_ids = tuple(tokenizer.encode(spelled, add_special_tokens=False))
        num_tokens += len(token_ids)
        if num_tokens > 2 * MAX_LIST_TOKENS:  # NOTE: even if both spellings of every word are the same tokens
            raise RequestError(f"bad_words has more than {MAX_LIST_TOKENS} tokens; give fewer words", param="bad_words")
        found[token_ids] = None
    return tuple(found)
