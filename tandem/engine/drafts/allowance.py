"""Allowance: limits the time that drafts may lose in total, compared with serving without drafts.

Time is counted in steps without drafts. The balance grows by `SHARE` with each step and by what drafts save, and
shrinks by what they lose; drafts are tried only while it is positive. So however often drafts are wrong, serving takes
at most `SHARE` longer than without them, plus once at most the largest balance (`MOST` steps) and one trial.
"""

SHARE = 0.0125  # of the time without drafts that they may lose
START = 1.0  # steps; so that a worker's first requests are drafted
MOST = 8.0  # what a long time of gains leaves to lose, before a change of the texts is noticed


class Allowance:
    """Balance of one executor's drafts, in steps without drafts."""

    def __init__(self) -> None:
        self._balance = START

    @property
    def is_left(self) -> bool:
        """Whether drafts may be tried. One trial may cost more than the balance."""
        return self._balance > 0

    def note_step(self) -> None:
        """Count a step of any kind: the balance grows by `SHARE`."""
        self.note_gain(SHARE)

    def note_gain(self, num_steps: float) -> None:
        """Record time that drafts saved; negative: lost."""
        self._balance = min(MOST, self._balance + num_steps)
