"""Allowance: the time that drafts may have lost, all in all, against steps without any.

Counted in such steps. What drafts gain is added and what they lose is taken off. So however often guesses are wrong,
serving takes at most `SHARE` longer than without drafts, and once `MOST` steps and a trial.
"""

SHARE = 0.0125
START = 1.0  # steps; so that a worker's first requests are drafted
MOST = 8.0  # what a long time of gains leaves to lose, before a change of the texts is noticed


class Allowance:
    """Balance of one executor, in steps without drafts."""

    def __init__(self) -> None:
        self._balance = START

    @property
    def is_left(self) -> bool:
        """Whether more may be tried. One trial may cost more than is left."""
        return self._balance > 0

    def note_step(self) -> None:
        """Record a step, whatever it computed."""
        self.note_gain(SHARE)

    def note_gain(self, num_steps: float) -> None:
        """Record time that was saved, or if negative lost."""
        self._balance = min(MOST, self._balance + num_steps)
