"""Validates requests before the engine takes them, so that nothing a caller sends can break a step.

What is refused raises `InvalidRequestError`. Cheap checks come first and nothing is copied before it was counted. No
function keeps state.
"""

from array import array
from collections.abc import Sequence

import numpy as np

from tandem.core.errors import InvalidRequestError, shown
from tandem.core.sampling_params import SamplingParams, validate_for_vocab
from tandem.core.scope import CacheScope
from tandem.core.speculate import AUTO, OFF
from tandem.core.token_ids import packed
from tandem.scheduler.request import WHOLE, Handoff
from tandem.text.grammars import CompiledGrammar, Grammars
from tandem.text.tokenizer import Tokenizer

MAX_NAME_CHARACTERS = 256  # of a request id
MAX_CHARACTERS_PER_TOKEN = 1024  # of a whole prompt on average; real text has fewer than ten


def check_request_id(request_id: object) -> None:
    """Refuse a request id that is no text, or too long.

    Raises:
        InvalidRequestError: naming it.
    """
    if not isinstance(request_id, str) or not 1 <= len(request_id) <= MAX_NAME_CHARACTERS:
        raise InvalidRequestError(
            f"request_id={shown(request_id)} must be text of 1 to {MAX_NAME_CHARACTERS} characters"
        )


def check_scope(scope: object) -> None:
    """Refuse a cache scope with an adapter: this engine applies none.

    Raises:
        InvalidRequestError: naming what is wrong.
    """
    if not isinstance(scope, CacheScope):
        raise InvalidRequestError(f"scope={shown(scope)} must be a CacheScope")
    if scope.adapter is not None:
        raise InvalidRequestError(
            f"scope.adapter={scope.adapter.hex()} is not loaded; this engine serves the model's own weights only"
        )


def encode_prompt(prompt: object, tokenizer: Tokenizer | None, vocab_size: int, max_model_len: int) -> "array[int]":
    """The prompt's token ids, packed. All are known to the model, and fewer than the context holds.

    Raises:
        InvalidRequestError: it is neither text nor token ids, empty, too long, or holds an id the model lacks.
    """
    token_ids: Sequence[int]
    if isinstance(prompt, str):
        token_ids = _encode_text(prompt, tokenizer, max_model_len)
    elif isinstance(prompt, Sequence) and not isinstance(prompt, (bytes, bytearray, memoryview)):
        _check_length(len(prompt), max_model_len)
        token_ids = prompt
    else:
        raise InvalidRequestError(f"the prompt is of type {type(prompt).__name__}; give text or a list of token ids")
    _check_length(len(token_ids), max_model_len)
    if _are_packed_ids(token_ids, vocab_size):
        return packed(token_ids)
    for token_id in token_ids:
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise InvalidRequestError(f"prompt token {shown(token_id)} is not an id from 0 to {vocab_size - 1}")
    return packed(token_ids)


def _are_packed_ids(token_ids: Sequence[int], vocab_size: int) -> bool:
    """Whether these are packed ids, all known to the model. Does not loop over them."""
    if not isinstance(token_ids, array) or token_ids.typecode != "I":
        return False
    return int(np.frombuffer(token_ids, np.uint32).max()) < vocab_size


def check_params(
    params: object, tokenizer: Tokenizer | None, vocab_size: int, grammars: Grammars | None = None
) -> CompiledGrammar | None:
    """Refuse sampling options that this model or engine cannot honour (`SamplingParams` checks all others). Returns the
    compiled grammar, to be held for as long as the answer needs it; None = there is none.

    A grammar that `grammars` does not know yet takes up to a second to compile.

    Raises:
        InvalidRequestError: naming what is wrong.
        CapacityError: the grammar could not be tried.
    """
    if not isinstance(params, SamplingParams):
        raise InvalidRequestError(f"params={shown(params)} must be a SamplingParams")
    if params.stop and tokenizer is None:
        raise InvalidRequestError("this engine has no tokenizer, so stop strings cannot be matched")
    validate_for_vocab(params, vocab_size)
    if params.grammar is None:
        return None
    if grammars is None:
        raise InvalidRequestError("this engine has no tokenizer, so no grammar can be enforced")
    return grammars.compiled(params.grammar)


def check_handoff(handoff: Handoff, params: SamplingParams, vocab_size: int) -> None:
    """Refuse a division of the request between workers that would not be exact.

    Raises:
        InvalidRequestError: naming what is wrong.
    """
    if handoff is WHOLE:
        return
    if params.n != 1:
        raise InvalidRequestError(f"n={params.n} cannot be shared between workers; send each choice as its own request")
    if params.prompt_logprobs is not None and (handoff.num_expected_tokens or handoff.output_token_ids):
        raise InvalidRequestError("prompt_logprobs need the whole prompt to be computed by one worker")
    for token_id in handoff.output_token_ids:
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise InvalidRequestError(f"output token {shown(token_id)} is not an id from 0 to {vocab_size - 1}")


def check_drafter(params: SamplingParams, handoff: Handoff, drafter: str | None) -> None:
    """Refuse a drafter that this worker does not have. If another worker began the request, it continues without drafts
    instead, which changes no token.

    Raises:
        InvalidRequestError: naming the drafter asked for, and those there are.
    """
    accepted = [OFF, AUTO] if drafter is None else [OFF, AUTO, drafter]
    if params.speculate not in (None, *accepted) and not handoff.output_token_ids:
        raise InvalidRequestError(
            f"speculate={params.speculate!r} is not available: this model is served with "
            f"{'no drafter' if drafter is None else f'the drafter {drafter!r}'}; use {' or '.join(accepted)}"
        )


def _encode_text(text: str, tokenizer: Tokenizer | None, max_model_len: int) -> list[int]:
    if tokenizer is None:
        raise InvalidRequestError("this engine has no tokenizer, so a prompt must be token ids")
    longest = MAX_CHARACTERS_PER_TOKEN * max_model_len
    if len(text) > longest:
        raise InvalidRequestError(
            f"the prompt has {len(text)} characters; the context of {max_model_len} tokens takes at most {longest}"
        )
    return tokenizer.encode(text, add_special_tokens=True)


def _check_length(num_tokens: int, max_model_len: int) -> None:
    if num_tokens == 0:
        raise InvalidRequestError("the prompt is empty: it needs at least one token")
    if num_tokens >= max_model_len:
        raise InvalidRequestError(
            f"the prompt has {num_tokens} tokens; the context of {max_model_len} has room for at most "
            f"{max_model_len - 1}; shorten it"
        )
