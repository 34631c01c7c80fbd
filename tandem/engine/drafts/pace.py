"""Pace: how many times as long as usual steps of all kinds take at present, because other work has begun or ended.

Times are compared as if all steps had one pace. Else steps without drafts, measured beside other work, would seem dear
and those with drafts, measured before, cheap.
"""

from collections import deque
from statistics import median

_NUM_STEPS = 5
_MOST_USUAL = 1.5  # less is noise, or contexts that grow, which measurements follow
_LASTING_STEPS = 64


class Pace:
    """Follows the last steps. One disturbed step is no pace."""

    def __init__(self) -> None:
        self._ratios: deque[float] = deque(maxlen=_NUM_STEPS)
        self._num_unusual = 0

    def note(self, ratio: float) -> None:
        """Record how many times as long as usual a step took."""
        self._ratios.append(ratio)
        self._num_unusual = 0 if self.is_usual else self._num_unusual + 1

    @property
    def is_usual(self) -> bool:
        return self.factor == 1.0

    @property
    def lasts(self) -> bool:
        """Whether the pace has been another for so long that times should be measured anew."""
        return self._num_unusual >= _LASTING_STEPS

    @property
    def factor(self) -> float:
        """1 at the usual pace. What was slow is over with the first step that is not."""
        if len(self._ratios) < _NUM_STEPS:
            return 1.0
        found = median(self._ratios)
        if found > _MOST_USUAL:
            return max(1.0, min(found, self._ratios[-1]))
        return found if found < 1 / _MOST_USUAL else 1.0
