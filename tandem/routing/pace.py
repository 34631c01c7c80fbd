"""Pace of one stage of a worker: ratio of measured times to those its kind's calibrated speed predicts, in rounds.

Dividing by the prediction removes the effect of load, and a sum over a round counts a pause by its length: a worker
that runs a sixteenth of the time has sixteen times the ratio, though most of its steps are as short as ever. A round
stores its work rather than the prediction, so that rounds of several workers are compared at the same speed.
"""

from dataclasses import dataclass

from tandem.routing.least_squares import Vector

_NOTHING: Vector = (0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Round:
    """Sums over a round's measurements. features: the three values that a speed model's coefficients multiply, such as
    prompts, tokens and query-key pairs.
    """

    features: Vector = _NOTHING
    measured_ms: float = 0.0
    num_samples: int = 0

    def plus(self, features: Vector, measured_ms: float) -> "Round":
        """Returns the round with one more measurement."""
        total = tuple(old + new for old, new in zip(self.features, features, strict=True))
        return Round(total, self.measured_ms + measured_ms, self.num_samples + 1)

    def ratio(self, coefficients: Vector) -> float:
        """Measured time divided by predicted time; 1 if the prediction is zero."""
        expected_ms = sum(each * value for each, value in zip(coefficients, self.features, strict=True))
        return self.measured_ms / expected_ms if expected_ms > 0 else 1.0


@dataclass(slots=True)
class PaceRounds:
    """Rounds of one stage (prefill or decode) of one worker. last: the round closed last, at `closed_at_s`. num_slow:
    slow rounds in a row, which the caller counts.
    """

    last: Round = Round()
    closed_at_s: float = float("-inf")
    num_slow: int = 0
    _open: Round = Round()
    _opened_at_s: float = 0.0

    def observe(self, features: Vector, measured_ms: float, now_s: float) -> None:
        """Add one measurement to the open round."""
        if self._open.num_samples == 0:
            self._opened_at_s = now_s
        self._open = self._open.plus(features, measured_ms)

    def close_round(self, now_s: float, round_s: float, num_samples: int) -> bool:
        """Close the open round if it has lasted `round_s` and has `num_samples` measurements; True if it was closed."""
        if self._open.num_samples < num_samples or now_s - self._opened_at_s < round_s:
            return False
        self.last, self.closed_at_s = self._open, now_s
        self.discard_round()
        return True

    def discard_round(self) -> None:
        """Drop the open round's measurements."""
        self._open = Round()
