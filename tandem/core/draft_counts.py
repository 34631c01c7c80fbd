"""Counts of drafted and accepted tokens, as a worker reports them."""

from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Totals since a worker started. Position 0 is the first draft of a request's step.

    Args:
        num_steps: decode steps, counted once for each request in them. Each brought one token and the accepted
            drafts; a last step that only finds an answer complete is counted too.
        drafted_at: drafts computed, by position.
        accepted_at: drafts that equalled the token chosen, by position, as many positions. A draft is accepted only if
            all before it are.
        saved_s: seconds that a request of this worker was spared in the mean of each step's requests, added up. Less
            than 0 where drafting took longer than it gained. None = not told.
    """

    num_steps: int = 0
    drafted_at: tuple[int, ...] = ()
    accepted_at: tuple[int, ...] = ()
    saved_s: float | None = None

    @property
    def num_drafted(self) -> int:
        return sum(self.drafted_at)

    @property
    def num_accepted(self) -> int:
        return sum(self.accepted_at)

    @property
    def steps_by_tokens(self) -> tuple[int, ...]:
        """Numbers of steps that brought 1, 2, … tokens to a request. They add up to `num_steps`."""
        at_least = (self.num_steps, *self.accepted_at, 0)
        return tuple(more - most for more, most in pairwise(at_least))
