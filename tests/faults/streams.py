"""Requests to a cluster in fault tests, and streams that can be watched and dropped at any moment."""

import http.client
import json
import random
import socket
import threading
import time
import urllib.parse
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from tandem.core.sampling_params import SamplingParams

PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt and how it is answered. `salt`: prompts of different salts share no cached KV, whatever their tokens."""

    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float = 0.0
    salt: str = ""

    def salted(self, salt: str) -> "Asked":
        return replace(self, salt=salt)

    def body(self, model: str) -> dict[str, Any]:
        return {
            "model": model,
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": 5,
            "cache_salt": self.salt,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }

    def params(self) -> SamplingParams:
        """Sampling parameters that the gateway makes of the body."""
        return SamplingParams(max_tokens=self.max_tokens, temperature=self.temperature, seed=5, ignore_eos=True)


def asked_of(seed: int, num_tokens: int, max_tokens: int, temperature: float = 0.0) -> Asked:
    """A random prompt."""
    source = random.Random(seed)
    return Asked(tuple(source.randrange(3, 4000) for _ in range(num_tokens)), max_tokens, temperature)


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens that came together. `at_s`: by `time.monotonic`."""

    at_s: float
    token_ids: tuple[int, ...]


class Answer:
    """A streamed completion, read by a thread of its own as it comes. Use as a context: leaving it hangs up."""

    def __init__(self, url: str, model: str, asked: Asked, request_id: str) -> None:
        self.asked = asked
        self.request_id = request_id
        self.pieces: list[Piece] = []
        self.error: str | None = None
        self.ended_s: float | None = None
        self._changed = threading.Condition()
        self._connection = http.client.HTTPConnection(urllib.parse.urlsplit(url).netloc, timeout=60.0)
        self._body = json.dumps(asked.body(model))
        self._connection.connect()
        self.sent_s = time.monotonic()
        self._thread = threading.Thread(target=self._read, name=request_id)
        self._thread.start()

    def __enter__(self) -> "Answer":
        return self

    def __exit__(self, *_: object) -> None:
        self.hang_up()

    @property
    def token_ids(self) -> list[int]:
        return [token_id for piece in list(self.pieces) for token_id in piece.token_ids]

    @property
    def is_over(self) -> bool:
        return self.ended_s is not None

    @property
    def took_s(self) -> float:
        """From its being sent to its end."""
        assert self.ended_s is not None
        return self.ended_s - self.sent_s

    def wait(self, num_tokens: int | None = None, timeout_s: float = PATIENCE_S) -> None:
        """Until so many tokens have come, or else until it is over."""

        def has_come() -> bool:
            return self.is_over or (num_tokens is not None and len(self.token_ids) >= num_tokens)

        with self._changed:
            assert self._changed.wait_for(has_come, timeout_s), f"{self.request_id} has {len(self.token_ids)} tokens"

    def hang_up(self) -> None:
        """Close the connection, in whatever state it is; returns when the thread has ended."""
        with suppress(OSError, AttributeError):
            self._connection.sock.shutdown(socket.SHUT_RDWR)
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), f"{self.request_id} cannot be hung up"
        self._connection.close()

    def longest_silence_s(self, since_s: float) -> float:
        """Between two signs of life, from `since_s` on."""
        assert self.ended_s is not None
        times = [since_s, *(piece.at_s for piece in self.pieces if piece.at_s > since_s), max(since_s, self.ended_s)]
        return max(later - earlier for earlier, later in pairwise(times))

    def _read(self) -> None:
        error: str | None
        try:
            headers = {"content-type": "application/json", "x-request-id": self.request_id}
            self._connection.request("POST", "/v1/completions", self._body, headers)
            with self._connection.getresponse() as response:
                error = self._read_events(response) if response.status == 200 else response.read().decode()
        except (OSError, http.client.HTTPException) as failure:
            error = f"connection lost: {failure!r}"
        with self._changed:
            self.error, self.ended_s = error, time.monotonic()
            self._changed.notify_all()

    def _read_events(self, response: http.client.HTTPResponse) -> str | None:
        """Error that the stream reports, or that it ended early; None when it came to its end."""
        error = None
        while line := response.readline():
            if line == b"data: [DONE]\n":
                return error
            if line.startswith(b"data: "):
                event = json.loads(line.removeprefix(b"data: "))
                error = error or (event["error"]["message"] if "error" in event else None)
                self._note(tuple(i for choice in event.get("choices", ()) for i in choice["token_ids"]))
        return error or "connection lost: the stream ended early"

    def _note(self, token_ids: tuple[int, ...]) -> None:
        if token_ids:
            with self._changed:
                self.pieces.append(Piece(time.monotonic(), token_ids))
                self._changed.notify_all()


@dataclass(frozen=True, slots=True)
class Known:
    """Request of most tests, and the tokens that an undisturbed cluster answers."""

    asked: Asked
    token_ids: list[int]
