"""One streamed answer as its client saw it, and the figures that many of them make. Pure.

Times are seconds of the client's monotonic clock. An event of a stream can hold several tokens: `p50` gaps are divided
by them (each token took its share), `p99` gaps are not (a reader waits for the whole event).
"""

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from tandem.core.errors import UnavailableError
from tandem.workload.slo import percentiles

SAME_EVENT_S = 0.001


class WrongAnswerError(UnavailableError):
    """An answer that cannot be raced: refused, too short, too long, of another prompt, or without its token ids."""


@dataclass(frozen=True, slots=True)
class Gap:
    """The time between two events of a stream; the later one brought `num_tokens` (a mean if it does not tell)."""

    start_s: float
    end_s: float
    num_tokens: float

    @property
    def length_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer of `num_output` tokens. `arrivals`: (time, tokens) of each event, as far as events tell."""

    sent_s: float
    arrivals: tuple[tuple[float, int], ...]
    num_prompt: int
    num_output: int
    token_ids: tuple[int, ...] = ()
    num_cached: int = 0

    @property
    def ttft_s(self) -> float:
        return self.arrivals[0][0] - self.sent_s

    @property
    def ended_s(self) -> float:
        return self.arrivals[-1][0]

    @property
    def tpot_s(self) -> float | None:
        """Mean time a token after those of the first event; None when there is none."""
        rest = self.num_output - self._tokens()[0]
        return (self.ended_s - self.arrivals[0][0]) / rest if rest > 0 else None

    def gaps(self) -> Iterator[Gap]:
        """Between neighbouring events."""
        tokens = self._tokens()
        for index in range(1, len(self.arrivals)):
            yield Gap(self.arrivals[index - 1][0], self.arrivals[index][0], tokens[index])

    def _tokens(self) -> list[float]:
        """Of each event. When counts do not add up, the server did not tell: one first, the rest evenly."""
        told = [float(count) for _, count in self.arrivals]
        if sum(told) == self.num_output:
            return told
        others = len(told) - 1
        return [1.0, *[(self.num_output - 1) / others] * others] if others else [float(self.num_output)]


def merged(arrivals: Iterable[tuple[float, int]]) -> tuple[tuple[float, int], ...]:
    """Events within a millisecond as one, at the time of the first: tokens in pairs are not tokens at once and late."""
    found: list[tuple[float, int]] = []
    for at_s, count in arrivals:
        if found and at_s - found[-1][0] < SAME_EVENT_S:
            found[-1] = found[-1][0], found[-1][1] + count
        else:
            found.append((at_s, count))
    return tuple(found)


def median_ttft_ms(answers: Sequence[Answer]) -> float:
    return 1e3 * statistics.median(answer.ttft_s for answer in answers)


def tpot_figures(answers: Sequence[Answer]) -> dict[str, float]:
    """The median in ms; empty when every answer came as one event."""
    found = [answer.tpot_s for answer in answers if answer.tpot_s is not None]
    return {"TPOT p50": 1e3 * statistics.median(found)} if found else {}


def gap_figures(gaps: Sequence[Gap]) -> dict[str, float]:
    """Inter-token latency in ms, nearest rank; empty when there was no gap."""
    shares: list[float] = []
    for gap in gaps:
        shares += [gap.length_s / gap.num_tokens] * max(1, round(gap.num_tokens))
    each, whole = percentiles(shares), percentiles([gap.length_s for gap in gaps])
    if each is None or whole is None:
        return {}
    return {"ITL p50": 1e3 * each.p50, "ITL p99": 1e3 * whole.p99}


def wall_s(answers: Sequence[Answer]) -> float:
    """From the first request until the last token."""
    return max(answer.ended_s for answer in answers) - min(answer.sent_s for answer in answers)
