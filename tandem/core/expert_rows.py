"""Rows that the experts of each rank of a worker have computed: tells whether the ranks' work is even."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """Totals over all layers and steps. A row is one token at one of its experts.

    Args:
        by_rank: rows of the experts that each rank has.
        busiest: of each layer in each step the rows of the rank with the most, added up. All ranks wait for that one,
            so it is `sum(by_rank) / len(by_rank)` where the work is always even, and `sum(by_rank)` where one rank has
            it all.
    """

    by_rank: tuple[int, ...] = ()
    busiest: int = 0

    @property
    def imbalance(self) -> float | None:
        """Work of a layer's busiest rank as a multiple of an even share, at least 1; None = there were no rows."""
        total = sum(self.by_rank)
        return self.busiest * len(self.by_rank) / total if total else None
