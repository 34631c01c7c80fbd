"""Counts of drafted and accepted tokens, of a worker or of one of its requests."""

from dataclasses import dataclass
from itertools import pairwise, zip_longest


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Totals since a worker or request began. Position 0 is the first draft of a request's step.

    Args:
        num_steps: decode steps, counted once for each request in them. Each brought one token and the accepted
            drafts; a last step that only finds an answer complete is counted too.
        drafted_at: drafts computed, by position.
        accepted_at: drafts that equalled the token chosen, by position, as many positions. A draft is accepted only if
            all before it are.
        saved_s: estimated seconds that drafts saved the request; of a worker, the sum over its steps of what they saved
            a request on average. Negative = drafting took longer than it gained. None = not reported.
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
    def tokens_per_step(self) -> float:
        """Mean number of tokens that a decode step brought a request."""
        return 1 + self.num_accepted / max(1, self.num_steps)

    @property
    def by_position(self) -> str:
        """Accepted drafts by position from 1, as `1: 80 of 100, 2: 55 of 80`."""
        pairs = zip(self.accepted_at, self.drafted_at, strict=False)
        return ", ".join(f"{place}: {accepted} of {drafted}" for place, (accepted, drafted) in enumerate(pairs, 1))

    @property
    def steps_by_tokens(self) -> tuple[int, ...]:
        """Numbers of steps that brought 1, 2, … tokens to a request. They add up to `num_steps`."""
        at_least = (self.num_steps, *self.accepted_at, 0)
        return tuple(more - most for more, most in pairwise(at_least))

    def __add__(self, other: "DraftCounts") -> "DraftCounts":
        return DraftCounts(
            self.num_steps + other.num_steps,
            tuple(map(sum, zip_longest(self.drafted_at, other.drafted_at, fillvalue=0))),
            tuple(map(sum, zip_longest(self.accepted_at, other.accepted_at, fillvalue=0))),
            (self.saved_s or 0.0) + (other.saved_s or 0.0),
        )

    def since(self, before: "DraftCounts") -> "DraftCounts":
        """Counts made after `before`. Counts that fell, as those of workers that left, count as 0."""

        def grown(now: tuple[int, ...], then: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(max(0, late - early) for late, early in zip_longest(now, then, fillvalue=0))

        return DraftCounts(
            max(0, self.num_steps - before.num_steps),
            grown(self.drafted_at, before.drafted_at),
            grown(self.accepted_at, before.accepted_at),
            (self.saved_s or 0.0) - (before.saved_s or 0.0),
        )
