"""Requests to a server, with bodies in OpenAI's form. Pure."""

from dataclasses import dataclass

import orjson

from tandem.loadtest.token_text import Tokens

PATH = "/v1/completions"


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One request. `turn`: its place in its conversation, from 0."""

    prompt: Tokens
    num_output_tokens: int
    turn: int = 0


class BodyWriter:
    """Writes bodies that differ only in prompt and length.

    NOTE: `return_token_ids` tells how many tokens each event holds; a token may have no text of its own.
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

    def body(self, ask: LoadRequest) -> bytes:
        return b'%s%d,"prompt":[%s]}' % (self._start, ask.num_output_tokens, ask.prompt.text)
