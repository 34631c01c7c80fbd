"""Reads one streamed answer: the arrival time of each token, the server's token counts, and its error, if any.

Invariant: an answer counts as complete only when its stream says so; one that just stops does not.
"""

from collections.abc import Mapping
from typing import Any

import orjson

from tandem.core.clock import Clock
from tandem.loadtest.failure import MALFORMED, ExchangeError, Failure, failure_of_status
from tandem.loadtest.sse import EventReader

_DONE = b"[DONE]"
_MAX_ERROR_BYTES = 1 << 16


class AnswerReader:
    """A `ResponseReceiver` for one answer. Times are taken when a chunk is read, before it is parsed.
    Call `end` after the body, then read the results: `arrivals` ((time, number of tokens) of each event with tokens),
    `token_ids` (empty if the server reports none), `usage`, `request_id` and `failure`.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._events = EventReader()
        self._status = 0
        self._headers: Mapping[bytes, bytes] = {}
        self._error = b""
        self._is_done = False
        self.request_id: str | None = None
        self.arrivals: list[tuple[float, int]] = []
        self.token_ids: list[int] = []
        self.usage: Mapping[str, Any] = {}
        self.failure: Failure | None = None

    def head(self, status: int, headers: dict[bytes, bytes]) -> None:
        self._status, self._headers = status, headers
        request_id = headers.get(b"x-request-id")
        self.request_id = None if request_id is None else request_id.decode("latin-1")
        if status == 200 and not headers.get(b"content-type", b"").startswith(b"text/event-stream"):
            raise ExchangeError(MALFORMED, f"the answer is no event stream: {headers.get(b'content-type', b'')!r}")

    def body(self, chunk: bytes) -> None:
        now_s = self._clock.now_s()
        if self._status != 200:
            self._error = (self._error + chunk)[:_MAX_ERROR_BYTES]
            return
        for data in self._events.feed(chunk):
            if self._is_done:
                raise ExchangeError(MALFORMED, "there is an event after the last one")
            if data == _DONE:
                self._is_done = True
            else:
                self._take(_parsed(data), now_s)

    def end(self) -> None:
        """Checks the answer once its body has ended.

        Raises:
            ExchangeError: the stream ended before the answer was complete.
        """
        if self._status != 200:
            self._refused()
        elif self.failure is None and not (self._is_done and self._events.is_empty):
            raise ExchangeError(MALFORMED, "the stream ended without [DONE]")

    def _take(self, event: Mapping[str, Any], now_s: float) -> None:
        if "error" in event:
            code, message = _described(event)
            self.failure = failure_of_status(self._status, code, message, None, has_begun=True)
            return
        usage = event.get("usage")
        if isinstance(usage, dict):
            self.usage = usage
        for choice in _choices(event):
            token_ids = choice.get("token_ids")
            if token_ids is None:
                if choice.get("text"):
                    self.arrivals.append((now_s, 1))  # NOTE: of a server that does not tell; usage corrects the sum
            elif not isinstance(token_ids, list) or not all(type(token_id) is int for token_id in token_ids):
                raise ExchangeError(MALFORMED, "token_ids are no list of token ids")
            elif token_ids:
                self.token_ids += token_ids
                self.arrivals.append((now_s, len(token_ids)))

    def _refused(self) -> None:
        try:
            code, message = _described(_parsed(self._error))
        except ExchangeError:
            code, message = "", self._error[:200].decode(errors="replace")
        retry_after = self._headers.get(b"retry-after")
        told = None if retry_after is None else retry_after.decode("latin-1")
        self.failure = failure_of_status(self._status, code, message, told, has_begun=False)


def _parsed(data: bytes) -> dict[str, Any]:
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise ExchangeError(MALFORMED, f"{data[:80]!r} is no JSON") from error
    if not isinstance(value, dict):
        raise ExchangeError(MALFORMED, f"{data[:80]!r} is no JSON object")
    return value


def _choices(event: Mapping[str, Any]) -> list[dict[str, Any]]:
    choices = event.get("choices")
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        raise ExchangeError(MALFORMED, "an event has no choices")
    return choices


def _described(value: Mapping[str, Any]) -> tuple[str, str]:
    """Code and message of an error in OpenAI's format, as far as they are present."""
    error = value.get("error")
    if not isinstance(error, dict):
        return "", str(error or value)[:200]
    code = error.get("code") or error.get("type") or ""
    return str(code)[:60], str(error.get("message", ""))[:200]
