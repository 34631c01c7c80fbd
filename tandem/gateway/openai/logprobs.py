"""Formats token log-probabilities in OpenAI's two formats. Pure: ids and numbers in, plain JSON values out."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tandem.core.types import TokenLogprobs
from tandem.text.tokenizer import Tokenizer

LEAST_LOGPROB = -9999.0  # JSON has no infinity


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """A token alone; bytes that are no text as `bytes:\\xf0\\x9f`."""
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs], num_top: int) -> dict[str, Any]:
    """`choices[].logprobs` of chat completions."""

    def one(token_id: int, logprob: float) -> dict[str, Any]:
        raw = tokenizer.token_bytes(token_id)
        return {"token": token_text(tokenizer, token_id), "logprob": _finite(logprob), "bytes": list(raw)}

    content = [
        one(entry.token_id, entry.logprob) | {"top_logprobs": [one(*top) for top in entry.top[:num_top]]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], entries: Sequence[TokenLogprobs | None], offset: int
) -> dict[str, Any]:
    """`choices[].logprobs` of completions. The first token of an echoed prompt has no logprobs: its entry is None.

    `offset`: where the first of these tokens begins in the answer's text, in characters.
    """
    tokens = [token_text(tokenizer, token_id) for token_id in token_ids]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [None if entry is None else _finite(entry.logprob) for entry in entries],
        "top_logprobs": [None if entry is None else _by_text(tokenizer, entry) for entry in entries],
        "text_offset": offsets,
    }


def prompt_logprobs(
    tokenizer: Tokenizer, entries: Sequence[TokenLogprobs | None]
) -> list[Mapping[str, Mapping[str, Any]] | None]:
    """The `prompt_logprobs` extension: log-probabilities by token id for each position of the prompt."""
    return [None if entry is None else _by_id(tokenizer, entry) for entry in entries]


def with_top(entries: Sequence[TokenLogprobs | None], num_top: int) -> list[TokenLogprobs | None]:
    """The entries with at most `num_top` alternatives each."""
    return [None if entry is None else replace(entry, top=entry.top[:num_top]) for entry in entries]


def _by_text(tokenizer: Tokenizer, entry: TokenLogprobs) -> dict[str, float]:
    found = {token_text(tokenizer, token_id): _finite(logprob) for token_id, logprob in reversed(entry.top)}
    return found | {token_text(tokenizer, entry.token_id): _finite(entry.logprob)}


def _by_id(tokenizer: Tokenizer, entry: TokenLogprobs) -> dict[str, Mapping[str, Any]]:
    ranked = [(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(entry.top, 1)]
    return {
        str(token_id): {"logprob": _finite(logprob), "rank": rank, "decoded_token": token_text(tokenizer, token_id)}
        for token_id, logprob, rank in [*ranked, (entry.token_id, entry.logprob, entry.rank)]
    }


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
