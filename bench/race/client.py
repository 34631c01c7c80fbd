"""The client of the race: sends token ids, times each event as its bytes are read, and refuses what is not exact.

Invariant: an answer that is returned has exactly the tokens that were asked for, counted by the server and by us as far
as its events tell; everything else raises.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

import orjson

from bench.race.answer import Answer, WrongAnswerError, merged
from bench.race.system import Served
from bench.race.workloads import Prompt
from tandem.core.clock import SystemClock
from tandem.loadtest.answer import AnswerReader
from tandem.loadtest.http_client import HttpClient

PATH = "/v1/completions"
_HEADERS = {"accept": "*/*", "user-agent": "tandem-race"}
Body = Callable[[Prompt, int], dict[str, object]]


class Client:
    """Speaks with one system, for one event loop. `body`: the system's own fields; `timeout_s`: of one request."""

    def __init__(self, served: Served, body: Body, timeout_s: float) -> None:
        self._clock = SystemClock()
        self._http = HttpClient(served.base_url, _HEADERS, self._clock)
        self._model = served.model
        self._own_fields = body
        self._timeout_s = timeout_s
        self._cpu_s, self._began_s = time.process_time(), self._clock.now_s()

    async def ask(self, prompt: Prompt, num_output: int, begun: asyncio.Event | None = None) -> Answer:
        """One request to its end.

        Raises:
            WrongAnswerError: it is not what was asked for.
            ExchangeError: there was no whole answer.
        """
        body = self._body(prompt, num_output)
        reader = _Watched(self._clock, begun)
        sent_s = self._clock.now_s()
        await self._http.exchange("POST", PATH, body, reader, self._timeout_s)
        reader.end()
        if reader.failure is not None:
            raise WrongAnswerError(f"{reader.failure.kind}: {reader.failure.message}")
        _check(reader, len(prompt), num_output)
        details = reader.usage.get("prompt_tokens_details") or {}
        return Answer(
            sent_s,
            merged(reader.arrivals),
            len(prompt),
            num_output,
            tuple(reader.token_ids),
            details.get("cached_tokens") or 0,
        )

    def cores(self) -> float:
        """Cores that this process has used since the client was made."""
        return (time.process_time() - self._cpu_s) / (self._clock.now_s() - self._began_s)

    async def close(self) -> None:
        await self._http.close()

    def _body(self, prompt: Prompt, num_output: int) -> bytes:
        fields: dict[str, object] = {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": num_output,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return orjson.dumps(fields | self._own_fields(prompt, num_output))


class _Watched(AnswerReader):
    """Says when the first token is here."""

    def __init__(self, clock: SystemClock, begun: asyncio.Event | None) -> None:
        super().__init__(clock)
        self._begun = begun

    def body(self, chunk: bytes) -> None:
        super().body(chunk)
        if self._begun is not None and self.arrivals:
            self._begun.set()
            self._begun = None


def _check(reader: AnswerReader, num_prompt: int, num_output: int) -> None:
    """NOTE: a server may leave out token ids; then its usage alone must be exact."""
    told = reader.usage
    if told.get("completion_tokens") != num_output:
        raise WrongAnswerError(f"usage says {_reported(told, 'completion_tokens')} of {num_output} answered tokens")
    if told.get("prompt_tokens") != num_prompt:
        raise WrongAnswerError(f"usage says {_reported(told, 'prompt_tokens')} of {num_prompt} prompt tokens")
    if reader.token_ids and len(reader.token_ids) != num_output:
        raise WrongAnswerError(f"the events have {len(reader.token_ids)} of {num_output} token ids")
    if not reader.arrivals or len(reader.arrivals) > num_output:
        raise WrongAnswerError(f"{num_output} tokens came as {len(reader.arrivals)} events")


def _reported(usage: Mapping[str, Any], name: str) -> str:
    return "nothing" if name not in usage else str(usage[name])
