"""Requests of a load test, with bodies in OpenAI's format. Pure."""

from dataclasses import dataclass

import orjson

from tandem.loadtest.token_text import Tokens

PATH = "/v1/completions"


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One request. `turn`: its index in its conversation, from 0."""

    prompt: Tokens
    num_output_tokens: int
    turn: int = 0


class BodyWriter:
    """Writes request bodies that differ only in prompt and length.

    NOTE: `return_token_ids` shows the number of tokens in each event, since a token may have no text of its own.
    """

    def __init__(self, model: str, *, ignore_eos: bool, temperature: float) -> None:
        fixed = {
            "model": model,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": temperature,
            "ignore_eos": ignore_eos,
            "return_token_ids": True,
        }
        self._start = orjson.dumps(fixed)[:-1] + b',"max_tokens":'

    def body(self, request: LoadRequest) -> bytes:
        return b'%s%d,"prompt":[%s]}' % (self._start, request.num_output_tokens, request.prompt.text)
