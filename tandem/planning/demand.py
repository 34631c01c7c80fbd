"""Recent and expected demand: forecasts of rates, and slowly decaying means of lengths.

Owns the history of traffic; independent of workers. Prompt tokens are forecast separately from requests, because long
prompts come in bursts that a mean length would hide.
"""

import math
from dataclasses import dataclass

from tandem.planning.capacity import OfferedLoad
from tandem.planning.forecast import ExpectedDemand, Forecast, ForecastSettings
from tandem.planning.observation import Traffic

_UNKNOWN_OUTPUT = 256.0  # tokens of an answer before any has ended


@dataclass(slots=True)
class _Mean:
    """Mean tokens per request, with exponentially decaying weights."""

    tokens: float = 0.0
    requests: float = 0.0

    def add(self, tokens: float, requests: float, kept: float) -> None:
        self.tokens = kept * self.tokens + tokens
        self.requests = kept * self.requests + requests

    def value(self, unknown: float) -> float:
        return self.tokens / self.requests if self.requests > 0 else unknown


class Demand:
    """Demand of one deployment. Call `observe` once for every window, in order."""

    def __init__(self, settings: ForecastSettings) -> None:
        self._memory_s = settings.memory_s / 3
        self._requests = Forecast(settings)
        self._missing = Forecast(settings)
        self._prompt = _Mean()
        self._cached = _Mean()
        self._output = _Mean()
        self._squares = _Mean()
        self._measured = _Mean()
        self._known: dict[float, tuple[ExpectedDemand, ExpectedDemand]] = {}

    def observe(self, traffic: Traffic, now_s: float) -> None:
        if traffic.duration_s <= 0:
            return
        kept = math.exp(-traffic.duration_s / self._memory_s)
        num_missing = max(0, traffic.num_prompt_tokens - traffic.num_cached_tokens)
        self._prompt.add(traffic.num_prompt_tokens, traffic.num_requests, kept)
        self._cached.add(traffic.num_cached_tokens, traffic.num_requests, kept)
        self._output.add(traffic.num_output_tokens, traffic.num_finished, kept)
        if traffic.variation is not None and traffic.num_requests:
            mean = num_missing / traffic.num_requests
            self._squares.add(traffic.num_requests * mean**2 * (1 + traffic.variation**2), traffic.num_requests, kept)
            self._measured.add(num_missing, traffic.num_requests, kept)
        self._known.clear()
        self._requests.observe(now_s, traffic.duration_s, traffic.num_requests / traffic.duration_s)
        self._missing.observe(now_s, traffic.duration_s, num_missing / traffic.duration_s)

    def now(self) -> OfferedLoad:
        """Demand of the last minute."""
        requests, missing = self._expect(0.0)
        return self._load(requests.level, missing.level)

    def arriving(self, horizon_s: float) -> OfferedLoad:
        """Expected demand at the horizon if the trend continues."""
        requests, missing = self._expect(horizon_s)
        return self._load(requests.mean, missing.mean)

    def at_most(self, horizon_s: float) -> OfferedLoad:
        """Upper bound of demand within the horizon, which the pools must sustain."""
        requests, missing = self._expect(horizon_s)
        return self._load(requests.upper, missing.upper)

    def variation(self, unknown: float) -> float:
        """Recent coefficient of variation of a request's tokens to compute; `unknown` if it was not measured."""
        mean = self._measured.value(0.0)
        return math.sqrt(max(0.0, self._squares.value(0.0) / mean**2 - 1)) if mean > 0 else unknown

    def _expect(self, horizon_s: float) -> tuple[ExpectedDemand, ExpectedDemand]:
        """(Forecast of requests, forecast of tokens to compute), cached per window and horizon."""
        found = self._known.get(horizon_s)
        if found is None:
            found = self._known[horizon_s] = self._requests.expect(horizon_s), self._missing.expect(horizon_s)
        return found

    def _missing_of_one(self) -> float:
        """Tokens to compute per prompt now; shows a burst of long prompts long before the decaying mean does."""
        requests, missing = self._expect(0.0)
        return missing.level / requests.level if requests.level > 0 else 0.0

    def _load(self, requests_per_s: float, missing_per_s: float) -> OfferedLoad:
        """Load of these rates; the length of a prompt follows from both, limited to the recent or current length.

        NOTE: without the limit, a large margin of tokens over a small margin of requests would give any length.
        """
        prompt = self._prompt.value(0.0)
        mean = max(0.0, prompt - self._cached.value(0.0))
        longest = max(prompt, self._missing_of_one(), 1.0)
        missing = min(longest, missing_per_s / requests_per_s) if requests_per_s > 0 else mean
        return OfferedLoad(
            requests_per_s=requests_per_s,
            num_prompt_tokens=max(prompt, missing),
            num_missing_tokens=missing,
            num_output_tokens=self._output.value(_UNKNOWN_OUTPUT),
        )
