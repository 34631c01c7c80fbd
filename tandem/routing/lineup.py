"""Candidates of a decision: the workers of a roster, some of them barred, as a sequence for loops.

Invariant: good for the decision it was made for; the next change of the roster moves its rows.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import overload

import numpy as np
from numpy.typing import NDArray

from tandem.routing.roster import Columns, Floats, Roster
from tandem.routing.snapshot import Links, RequestShape
from tandem.routing.standing import WorkerSnapshot

Mask = NDArray[np.bool_]
Rows = NDArray[np.intp]


class Lineup(Sequence[WorkerSnapshot]):
    """The roster's workers without the barred ones, in no order that means anything."""

    def __init__(self, roster: Roster, barred: Mask | None = None) -> None:
        self.roster = roster
        self._barred = barred

    @staticmethod
    def of(standings: Sequence[WorkerSnapshot], links: Links) -> "Lineup":
        """These; the same object if they are one already."""
        return standings if isinstance(standings, Lineup) else Lineup(Roster.of(standings, links))

    @property
    def columns(self) -> Columns:
        """Of the whole roster, barred ones included."""
        return self.roster.columns

    @property
    def block_size(self) -> int:
        """Tokens; workers of a pool agree on it. 1 where there is nobody."""
        standings = self.roster.standings
        return standings[0].worker.block_size if standings else 1

    def __len__(self) -> int:
        return len(self.roster) - (0 if self._barred is None else int(np.count_nonzero(self._barred)))

    def __iter__(self) -> Iterator[WorkerSnapshot]:
        standings = self.roster.standings
        if self._barred is None:
            return iter(standings)
        return (standings[row] for row in np.flatnonzero(~self._barred))

    @overload
    def __getitem__(self, key: int) -> WorkerSnapshot: ...
    @overload
    def __getitem__(self, key: slice) -> Sequence[WorkerSnapshot]: ...
    def __getitem__(self, key: int | slice) -> WorkerSnapshot | Sequence[WorkerSnapshot]:
        return list(self)[key]

    def without(self, barred: Mask) -> "Lineup":
        """With these barred too."""
        return Lineup(self.roster, barred if self._barred is None else self._barred | barred)

    def without_ids(self, worker_ids: Iterable[str]) -> "Lineup":
        """With these barred too, where they are there."""
        rows = [row for row in map(self.roster.row_of, worker_ids) if row is not None]
        if not rows:
            return self
        barred = np.zeros(len(self.roster), np.bool_)
        barred[rows] = True
        return self.without(barred)

    def forbid(self, costs: Floats) -> Floats:
        """`costs`, whose last dimension goes by row, with infinite ones for whoever is barred."""
        if self._barred is not None:
            costs[..., self._barred] = np.inf
        return costs

    def cached_blocks(self, request: RequestShape) -> Floats:
        """By row, leading blocks of the prompt that a worker can skip; `num_cached_blocks` of all."""
        if not request.leading_blocks:
            return np.zeros(len(self.roster))
        most = (request.num_tokens - 1) // self.block_size
        return np.minimum(self.roster.scattered(request.leading_blocks), most)

    def first(self, costs: Floats) -> int:
        """The row of least cost; among equals, the one chosen longest ago."""
        rows = np.flatnonzero(costs <= costs.min())
        return int(rows[0] if len(rows) == 1 else rows[self.columns.turn[rows].argmin()])

    def ranked(self, costs: Floats, limit: float) -> Rows:
        """Rows of costs below `limit`, the least first; among equals, the one chosen longest ago."""
        rows = np.flatnonzero(costs < limit)
        return rows[np.lexsort((self.columns.turn[rows], costs[rows]))]
