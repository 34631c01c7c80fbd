"""The server under test: waits until it is ready, finds out the model it serves, and sends requests.

Invariant: sending a request never raises for failures of the server or the network; they are part of its outcome.
"""

import asyncio
import json
from array import array
from dataclasses import dataclass
from typing import Any

from tandem.core.clock import Clock
from tandem.core.errors import ConfigurationError, UnavailableError
from tandem.loadtest.answer import AnswerReader
from tandem.loadtest.failure import SHORT, UNFINISHED, ExchangeError, Failure
from tandem.loadtest.http_client import HttpClient
from tandem.loadtest.load_request import PATH, BodyWriter, LoadRequest
from tandem.loadtest.outcome import RequestOutcome
from tandem.loadtest.plan import LoadPlan

_POLL_S = 0.25
_ANSWER_S = 10.0


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """Properties that a server reports; None: not reported."""

    model: str
    max_model_len: int | None = None
    version: str | None = None


@dataclass(frozen=True, slots=True)
class RequestResult:
    """An outcome, and the answer's token ids if the server reports them, from which the next turn's prompt is made."""

    outcome: RequestOutcome
    token_ids: list[int]


class GatewayEndpoint:
    """One gateway. Times in outcomes are relative to the zero set by `begin`."""

    def __init__(self, plan: LoadPlan, clock: Clock) -> None:
        headers = {"accept": "*/*", "user-agent": "tandem-load"}
        if plan.api_key is not None:
            headers["authorization"] = f"Bearer {plan.api_key}"
        self.http = HttpClient(plan.url, headers, clock)
        self.operators = self.http if plan.admin_url == plan.url else HttpClient(plan.admin_url, headers, clock)
        self._plan = plan
        self._clock = clock
        self._zero_s = 0.0
        self._writer: BodyWriter | None = None

    async def open(self) -> ServerFacts:
        """Waits until the gateway is ready and finds out what it serves.

        Raises:
            UnavailableError: it cannot be reached, is not ready in time, or lists no model.
            ConfigurationError: it does not serve the requested model, or refuses the key.
        """
        await self._wait_ready()
        facts = await self._facts()
        self._writer = BodyWriter(facts.model, ignore_eos=self._plan.ignore_eos, temperature=self._plan.temperature)
        return facts

    async def close(self) -> None:
        await self.http.close()
        await self.operators.close()

    def begin(self, zero_s: float) -> None:
        """Sets the time, on the clock, from which times in outcomes are counted."""
        self._zero_s = zero_s

    def now_s(self) -> float:
        """Seconds since the zero set by `begin`."""
        return self._clock.now_s() - self._zero_s

    async def send(self, request: LoadRequest, due_s: float) -> RequestResult:
        """Sends a request now and reads the answer to its end."""
        assert self._writer is not None, "open it first"
        reader = AnswerReader(self._clock)
        body = self._writer.body(request)
        sent_s = self.now_s()
        failure: Failure | None = None
        try:
            await self.http.exchange("POST", PATH, body, reader, self._plan.request_timeout_s)
            reader.end()
            failure = reader.failure or self._judged(request, reader)
        except ExchangeError as error:
            failure = reader.failure or Failure(error.kind, str(error))
        except asyncio.CancelledError:
            return self._answered(request, reader, due_s, sent_s, Failure(UNFINISHED, "the test was stopped"))
        return self._answered(request, reader, due_s, sent_s, failure)

    def _judged(self, request: LoadRequest, reader: AnswerReader) -> Failure | None:
        """The failure of a complete answer that is too short; None if it is not."""
        num_tokens = _num_output(reader)
        if not reader.arrivals:
            return Failure(SHORT, "the answer has no token")
        if self._plan.ignore_eos and num_tokens != request.num_output_tokens:
            return Failure(SHORT, f"the answer has {num_tokens} tokens instead of {request.num_output_tokens}")
        return None

    def _answered(
        self, request: LoadRequest, reader: AnswerReader, due_s: float, sent_s: float, failure: Failure | None
    ) -> RequestResult:
        details = reader.usage.get("prompt_tokens_details")
        outcome = RequestOutcome(
            due_s=due_s,
            sent_s=sent_s,
            ended_s=self.now_s(),
            num_prompt_tokens=request.prompt.count,
            num_cached_tokens=_whole(details.get("cached_tokens")) if isinstance(details, dict) else 0,
            num_output_tokens=_num_output(reader),
            turn=request.turn,
            event_times_s=array("d", [at_s - self._zero_s for at_s, _ in reader.arrivals]),
            event_tokens=array("I", [count for _, count in reader.arrivals]),
            failure=failure,
            request_id=reader.request_id,
        )
        return RequestResult(outcome, reader.token_ids)

    async def _wait_ready(self) -> None:
        """NOTE: other servers have no /ready; a 404 counts as ready."""
        deadline_s = self._clock.now_s() + self._plan.ready_timeout_s
        while True:
            try:
                answer = await self.http.get("/ready", _ANSWER_S)
                if answer.status in (200, 401, 403, 404, 405):
                    return
                problem = f"GET /ready answers {answer.status}"
            except ExchangeError as error:
                problem = str(error)
            if self._clock.now_s() >= deadline_s:
                raise UnavailableError(f"no gateway is ready at {self._plan.url} ({problem}); name yours with --url")
            await asyncio.sleep(_POLL_S)

    async def _facts(self) -> ServerFacts:
        answer = await self.http.get("/v1/models", _ANSWER_S)
        if answer.status in (401, 403):
            raise ConfigurationError(f"{self._plan.url} answers {answer.status}: give its key (TANDEM_LOAD_API_KEY)")
        served = {str(entry.get("id")): entry for entry in _entries(answer.content)}
        model = self._plan.model or next(iter(served), None)
        if answer.status != 200 or model is None:
            raise UnavailableError(f"GET {self._plan.url}/v1/models answers {answer.status} and names no model")
        if model not in served:
            raise ConfigurationError(f"model={model!r} is not served there; these are: {', '.join(served)}")
        length = served[model].get("max_model_len")
        return ServerFacts(model, length if isinstance(length, int) else None, await self._version())

    async def _version(self) -> str | None:
        try:
            found = json.loads((await self.http.get("/version", _ANSWER_S)).content)
        except (ExchangeError, ValueError):
            return None
        return str(found["version"])[:40] if isinstance(found, dict) and "version" in found else None


def _entries(content: bytes) -> list[dict[str, Any]]:
    try:
        found = json.loads(content)
    except ValueError as error:
        raise UnavailableError(f"GET /v1/models answers no JSON: {content[:80]!r}") from error
    entries = found.get("data") if isinstance(found, dict) else None
    return [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []


def _num_output(reader: AnswerReader) -> int:
    """The number of output tokens: as reported by the server, else as counted here."""
    told = _whole(reader.usage.get("completion_tokens"))
    return told or sum(count for _, count in reader.arrivals)


def _whole(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else 0
