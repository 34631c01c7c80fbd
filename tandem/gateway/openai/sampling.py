"""OpenAI's sampling fields, and the engine extras beside them, as `SamplingParams` and choices.

Invariant: every choice has a seed before it leaves the gateway, so that any worker draws the same tokens.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tandem.core.errors import shown
from tandem.core.randomness import choice_seed
from tandem.core.sampling_params import MAX_LIST_TOKENS, SamplingParams, validate_for_vocab
from tandem.gateway.errors import RequestError
from tandem.gateway.openai.fields import GenerateBody
from tandem.gateway.request import Choice
from tandem.rpc.messages import ModelInfo
from tandem.text.tokenizer import Tokenizer

EXPECTED_OUTPUT_TOKENS = 256  # of an answer whose length nobody knows

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
)


def read_params(
    body: GenerateBody, info: ModelInfo, tokenizer: Tokenizer, *, max_tokens: int | None, logprobs: int | None
) -> SamplingParams:
    """What was said, over the model's defaults, over ours. `seed` may still be None.

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


def make_choices(request_id: str, prompts: Sequence[Sequence[int]], params: SamplingParams) -> tuple[Choice, ...]:
    """`params.n` answers to each prompt. A request without a seed gets one nobody can foresee."""
    seed = random.SystemRandom().getrandbits(63) if params.seed is None else params.seed
    each = [replace(params, n=1, seed=choice_seed(seed, index)) for index in range(params.n)]
    is_single = len(prompts) * params.n == 1
    choices: list[Choice] = []
    for token_ids in map(tuple, prompts):
        for own in each:
            index = len(choices)
            choices.append(Choice(index, request_id if is_single else f"{request_id}/{index}", token_ids, own))
    return tuple(choices)


def expected_output(params: SamplingParams) -> int:
    """Tokens an answer probably has."""
    if params.ignore_eos and params.max_tokens is not None:
        return params.max_tokens
    return min(params.max_tokens or EXPECTED_OUTPUT_TOKENS, EXPECTED_OUTPUT_TOKENS)


def check_num_choices(num_prompts: int, n: int | None, max_choices: int) -> None:
    """Counted before anything is encoded."""
    if num_prompts * (n or 1) > max_choices:
        raise RequestError(
            f"{num_prompts} prompts with n={shown(n or 1)} are more than {max_choices} answers; send several requests",
            param="prompt" if num_prompts > 1 else "n",
        )


def _logit_bias(given: Mapping[str, float]) -> dict[int, float]:
    """JSON has only text for keys."""
    for key in given:
        if not (key.isascii() and key.isdecimal() and len(key) < 11):
            raise RequestError(f"logit_bias key {shown(key)} is not a token id", param="logit_bias")
    return {int(key): bias for key, bias in given.items()}


def _bad_words(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Each word as it is spelled at the start of a text and after a space."""
    if len(words) > MAX_LIST_TOKENS:
        raise RequestError(f"bad_words has {len(words)} entries; at most {MAX_LIST_TOKENS}", param="bad_words")
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        if not word.strip() or len(word) > 1024:
            raise RequestError(f"bad_words holds {shown(word)}; give short words", param="bad_words")
        for spelled in (word, " " + word.lstrip()):
            found[tuple(tokenizer.encode(spelled, add_special_tokens=False))] = None
    return tuple(found)
