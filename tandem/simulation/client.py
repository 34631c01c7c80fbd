"""Client of a simulated gateway: one HTTP request and its outcome. Calls the ASGI app directly, without a socket.

Invariant: `choices` are what was received, in order, without those that a crashed gateway never sent.
"""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Message, Scope

from tandem.simulation.model import MODEL
from tandem.simulation.processes import COMPLETIONS, PIN
from tandem.simulation.scenario import ClientRequest

_EVENT = b"data: "
_DONE = b"[DONE]"


@dataclass(slots=True)
class ClientOutcome:
    """Outcome of a client's request: what it received, and when. `heard_s`: time of the last tokens.

    Args:
        ask: the request.
        error: the message of a stream's error event, or of a refusal. `error_code`: its code.
        has_left: it disconnected before the end.
        is_lost: its gateway crashed.
        ended_s: None while it waits.
        longest_gap: (start, end) of the longest time between two tokens.
        choices: tokens of each answer, in order.
        token_times: when each of all tokens arrived.
    """

    ask: ClientRequest
    status: int | None = None
    choices: list[list[int]] = field(init=False)
    token_times: list[float] = field(default_factory=list)
    finish_reasons: dict[int, str] = field(default_factory=dict)
    error: str | None = None
    error_code: str | None = None
    has_left: bool = False
    is_lost: bool = False
    began_s: float = 0.0
    heard_s: float | None = None
    longest_gap: tuple[float, float] = (0.0, 0.0)
    ended_s: float | None = None

    def __post_init__(self) -> None:
        self.choices = [[] for _ in range(self.ask.num_choices)]

    @property
    def tokens(self) -> list[int]:
        """All tokens, one choice after the other."""
        return [token_id for choice in self.choices for token_id in choice]

    @property
    def is_whole(self) -> bool:
        """Whether every choice has a finish reason."""
        return len(self.finish_reasons) == len(self.choices)

    @property
    def ending(self) -> str:
        """The request's ending, in one or two words."""
        if self.is_whole:
            return "whole"
        if self.has_left:
            return "left"
        if self.is_lost:
            return "gateway died"
        return "waits" if self.ended_s is None else f"error {self.status}"


class Exchange:
    """One HTTP request to one gateway and its response; `receive` and `send` are the ASGI callables."""

    def __init__(self, ask: ClientRequest, secret: str, loop: asyncio.AbstractEventLoop) -> None:
        self.outcome = ClientOutcome(ask, began_s=loop.time())
        self.ended = asyncio.Event()
        self._loop = loop
        self._left = asyncio.Event()
        self._has_sent = False
        self._body = bytearray()
        self.scope: Scope = {
            "type": "http",
            "method": "POST",
            "path": COMPLETIONS,
            "headers": [
                (b"authorization", f"Bearer {secret}".encode()),
                (b"x-request-id", ask.request_id.encode()),
                (b"host", b"localhost"),
                (b"content-type", b"application/json"),
            ],
        }

    async def receive(self) -> Message:
        if not self._has_sent:
            self._has_sent = True
            return {"type": "http.request", "body": json.dumps(_body_of(self.outcome.ask)).encode(), "more_body": False}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        if self._left.is_set():
            return
        if message["type"] == "http.response.start":
            self.outcome.status = message["status"]
            return
        self._body += message.get("body", b"")
        if self.outcome.ask.is_stream and self.outcome.status == 200:
            self._take_events()
        if not message.get("more_body", False):
            self._take_end()
        leaves_after = self.outcome.ask.leaves_after_tokens
        if leaves_after is not None and len(self.outcome.tokens) >= leaves_after:
            self.leave()

    def leave(self) -> None:
        """Close the connection, unless the response is complete."""
        if not self.ended.is_set():
            self.outcome.has_left = True
            self._end()

    def lose(self) -> None:
        """Record that the gateway has crashed."""
        if not self.ended.is_set():
            self.outcome.is_lost = True
            self._end()

    def _take_events(self) -> None:
        *events, rest = bytes(self._body).split(b"\n\n")
        self._body = bytearray(rest)
        for event in events:
            data = event.removeprefix(_EVENT)
            if event.startswith(_EVENT) and data != _DONE:
                self._take_answer(json.loads(data))

    def _take_end(self) -> None:
        if not self.outcome.ask.is_stream or self.outcome.status != 200:
            self._take_answer(json.loads(bytes(self._body)))
        self._end()

    def _take_answer(self, answer: Mapping[str, Any]) -> None:
        if "error" in answer:
            self.outcome.error = str(answer["error"].get("message", answer["error"]))
            self.outcome.error_code = answer["error"].get("code")
            return
        if self.outcome.heard_s is not None:
            gap, longest = (self.outcome.heard_s, self._loop.time()), self.outcome.longest_gap
            self.outcome.longest_gap = max(gap, longest, key=lambda span: span[1] - span[0])
        self.outcome.heard_s = self._loop.time()
        for choice in answer["choices"]:
            token_ids = choice.get("token_ids", ())
            self.outcome.choices[choice["index"]] += token_ids
            self.outcome.token_times += [self._loop.time()] * len(token_ids)
            if choice["finish_reason"] is not None:
                self.outcome.finish_reasons[choice["index"]] = choice["finish_reason"]

    def _end(self) -> None:
        self.outcome.ended_s = self._loop.time()
        self._left.set()
        self.ended.set()


def _body_of(ask: ClientRequest) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": MODEL,
        "prompt": list(ask.prompt),
        "max_tokens": ask.max_tokens,
        "temperature": 0.0 if ask.seed is None else 1.0,
        "ignore_eos": ask.ignore_eos,
        "stream": ask.is_stream,
        "return_token_ids": True,
        "n": ask.num_choices,
        "user": "" if ask.pin_s is None else f"{PIN}{ask.pin_s}",
    }
    return body if ask.seed is None else {**body, "seed": ask.seed}
