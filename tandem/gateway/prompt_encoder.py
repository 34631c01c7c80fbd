"""Encodes text to token ids, in bounded memory and outside the event loop. Owned by one event loop.

Invariant: a text is encoded whole only if it cannot have many more tokens than allowed; longer ones are counted piece
by piece first. Long texts wait only for each other: they share one thread, a piece at a time.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from tandem.gateway.errors import RequestError
from tandem.text.tokenizer import Tokenizer

LONG_TEXT = 2048  # characters; encoding more, about a millisecond, must not hold up other streams
PIECE_CHARACTERS = 64 * 1024
COUNTED_CONTEXTS = 64  # how much longer than the context a text may be that is only counted
_SEAM_TOKENS = 64  # that a piece may have more than its part of the whole, where it was cut out
_WHOLE_BYTES = 512 * 1024  # in UTF-8: at most one token, some 300 bytes of memory, for each
_WHOLE_BYTES_PER_TOKEN = 8  # real text has about four
_MAX_COUNTED_TOKENS = 512 * 1024
_MAX_CHARACTERS = 8 * 2**20
_MAX_CHARACTERS_PER_TOKEN = 1024  # of a whole prompt on average; long runs of spaces have hundreds

T = TypeVar("T")


class PromptEncoder:
    """Encodes the prompts of one model."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._texts = ThreadPoolExecutor(4, thread_name_prefix="tandem-texts")
        self._long_texts = ThreadPoolExecutor(1, thread_name_prefix="tandem-long-texts")

    async def encode(
        self, text: str, max_model_len: int, *, add_special_tokens: bool, is_only_counted: bool = False
    ) -> list[int]:
        """The token ids of `text`.

        Raises:
            InvalidRequestError: it is no Unicode text, or leaves no room for one output token. With `is_only_counted`
                it may be as long as `COUNTED_CONTEXTS` contexts.
        """
        most = max_model_len - 1
        if is_only_counted:
            most = max(most, min(COUNTED_CONTEXTS * max_model_len, _MAX_COUNTED_TOKENS))

        def encoded() -> list[int]:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

        if len(text) <= LONG_TEXT:
            token_ids = encoded()
        elif _is_small(text, most):
            token_ids = await _run(self._texts, encoded)
        else:
            await self._check_pieces(text, most, max_model_len)
            token_ids = await _run(self._long_texts, encoded)
        if len(token_ids) > most:
            raise too_long(str(len(token_ids)), max_model_len)
        return token_ids

    async def token_ends(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """For each token of `text`, which `encode` has accepted, the number of characters before its end."""

        def ends() -> list[int]:
            return self._tokenizer.token_ends(text, add_special_tokens=add_special_tokens)

        if len(text) <= LONG_TEXT:
            return ends()
        return await _run(self._texts if len(text) <= _WHOLE_BYTES else self._long_texts, ends)

    def close(self) -> None:
        """Drops waiting work; no long text can be encoded afterwards."""
        self._texts.shutdown(wait=False, cancel_futures=True)
        self._long_texts.shutdown(wait=False, cancel_futures=True)

    async def _check_pieces(self, text: str, most: int, max_model_len: int) -> None:
        """Raises RequestError as soon as the tokens counted exceed the limit."""
        longest = min(_MAX_CHARACTERS_PER_TOKEN * most, _MAX_CHARACTERS)
        num_tokens = 0
        for start in range(0, min(len(text), longest), PIECE_CHARACTERS):
            num_tokens += await _run(self._long_texts, partial(self._count, text, start)) - _SEAM_TOKENS
            if num_tokens > most:
                raise too_long(f"at least {num_tokens}", max_model_len)
        if len(text) > longest:
            raise RequestError(
                f"prompt is too long: {len(text)} characters, of which at most {longest} are tokenised; this model's "
                f"maximum context length is {max_model_len} tokens",
                param="prompt",
                code="context_length_exceeded",
            )

    def _count(self, text: str, start: int) -> int:
        piece = text[start : start + PIECE_CHARACTERS]
        return len(self._tokenizer.encode(piece, add_special_tokens=False))


def check_length(token_ids: list[int], max_model_len: int) -> list[int]:
    """Returns `token_ids` if there is at least one and the context has room for one more. Raises RequestError."""
    if not token_ids:
        raise RequestError("the prompt is empty: it needs at least one token", param="prompt")
    if len(token_ids) >= max_model_len:
        raise too_long(str(len(token_ids)), max_model_len)
    return token_ids


def too_long(num_tokens: str, max_model_len: int) -> RequestError:
    """NOTE: contains both Anthropic's and OpenAI's wording, which clients look for to shorten a conversation."""
    return RequestError(
        f"prompt is too long: {num_tokens} tokens > {max_model_len - 1} maximum; this model's maximum context length "
        f"is {max_model_len} tokens; shorten it",
        param="prompt",
        code="context_length_exceeded",
    )


def _is_small(text: str, most: int) -> bool:
    """Whether encoding it whole takes little memory, whatever its content."""
    small = max(PIECE_CHARACTERS, min(_WHOLE_BYTES, _WHOLE_BYTES_PER_TOKEN * most))
    return len(text) <= small and len(text.encode("utf-8", "surrogatepass")) <= small


async def _run(threads: ThreadPoolExecutor, work: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(threads, work)
