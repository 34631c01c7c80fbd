"""Pace: ratio of present to usual step times, which changes when other work on the machine begins or ends.

Step times are compared after they have been divided by the pace. Otherwise steps without drafts that were measured
beside other work would seem slow, and steps with drafts that were measured before it fast.
"""

from collections import deque
from statistics import median

_NUM_STEPS = 5
_MOST_USUAL = 1.5  # less is noise, or contexts that grow, which measurements follow
_LASTING_STEPS = 64


class Pace:
    """The pace of the last steps. A single slow step does not change it."""

    def __init__(self) -> None:
        self._ratios: deque[float] = deque(maxlen=_NUM_STEPS)
        self._num_unusual = 0

    def note(self, ratio: float) -> None:
        """Record a step's time, divided by the usual time of such a step."""
        self._ratios.append(ratio)
        self._num_unusual = 0 if self.is_usual else self._num_unusual + 1

    @property
    def is_usual(self) -> bool:
        return self.factor == 1.0

    @property
    def lasts(self) -> bool:
        """Whether the pace has been unusual for so long that all times should be measured again."""
        return self._num_unusual >= _LASTING_STEPS

    @property
    def factor(self) -> float:
        """The ratio; 1 at the usual pace. Slowness is over with the first step that is not slow."""
        if len(self._ratios) < _NUM_STEPS:
            return 1.0
        found = median(self._ratios)
        if found > _MOST_USUAL:
            return max(1.0, min(found, self._ratios[-1]))
        return found if found < 1 / _MOST_USUAL else 1.0
