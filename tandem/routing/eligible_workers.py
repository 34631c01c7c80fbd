"""Eligible workers of a decision: the rows of a worker table that are not barred, as a sequence. `fleet` bars workers
that are dead, ejected, too small for the request, or excluded or reserved by it.

Valid for one decision only: the next change of the table may move its rows.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import overload

import numpy as np
from numpy.typing import NDArray

from tandem.routing.candidates import WorkerSnapshot
from tandem.routing.snapshot import Links, RequestShape
from tandem.routing.worker_table import Columns, Floats, WorkerTable

Mask = NDArray[np.bool_]
Rows = NDArray[np.intp]


class EligibleWorkers(Sequence[WorkerSnapshot]):
    """Workers of a table except the barred ones, in arbitrary order."""

    def __init__(self, table: WorkerTable, barred: Mask | None = None) -> None:
        self.table = table
        self._barred = barred

    @staticmethod
    def of(snapshots: Sequence[WorkerSnapshot], links: Links) -> "EligibleWorkers":
        """Returns `snapshots` as eligible workers; the same object if they are already."""
        return (
            snapshots if isinstance(snapshots, EligibleWorkers) else EligibleWorkers(WorkerTable.of(snapshots, links))
        )

    @property
    def columns(self) -> Columns:
        """Columns of the whole table, barred workers included."""
        return self.table.columns

    @property
    def block_size(self) -> int:
        """Tokens per block, equal for all workers of a pool; 1 if the table is empty."""
        snapshots = self.table.snapshots
        return snapshots[0].worker.block_size if snapshots else 1

    def __len__(self) -> int:
        return len(self.table) - (0 if self._barred is None else int(np.count_nonzero(self._barred)))

    def __iter__(self) -> Iterator[WorkerSnapshot]:
        snapshots = self.table.snapshots
        if self._barred is None:
            return iter(snapshots)
        return (snapshots[row] for row in np.flatnonzero(~self._barred))

    @overload
    def __getitem__(self, key: int) -> WorkerSnapshot: ...
    @overload
    def __getitem__(self, key: slice) -> Sequence[WorkerSnapshot]: ...
    def __getitem__(self, key: int | slice) -> WorkerSnapshot | Sequence[WorkerSnapshot]:
        return list(self)[key]

    def without(self, barred: Mask) -> "EligibleWorkers":
        """Returns the eligible workers without those of a row mask."""
        return EligibleWorkers(self.table, barred if self._barred is None else self._barred | barred)

    def without_ids(self, worker_ids: Iterable[str]) -> "EligibleWorkers":
        """Returns the eligible workers without these ids; ids that are not in the table are ignored."""
        rows = [row for row in map(self.table.row_of, worker_ids) if row is not None]
        if not rows:
            return self
        barred = np.zeros(len(self.table), np.bool_)
        barred[rows] = True
        return self.without(barred)

    def forbid(self, costs: Floats) -> Floats:
        """Returns `costs`, whose last dimension is the row, after setting those of barred workers to infinity."""
        if self._barred is not None:
            costs[..., self._barred] = np.inf
        return costs

    def cached_blocks(self, request: RequestShape) -> Floats:
        """Leading blocks of the prompt that each worker need not compute, by row: `num_cached_blocks` of all rows."""
        if not request.leading_blocks:
            return np.zeros(len(self.table))
        most = (request.num_tokens - 1) // self.block_size
        return np.minimum(self.table.scattered(request.leading_blocks), most)

    def first(self, costs: Floats) -> int:
        """The row of least cost; ties go to the worker chosen longest ago."""
        rows = np.flatnonzero(costs <= costs.min())
        return int(rows[0] if len(rows) == 1 else rows[self.columns.turn[rows].argmin()])

    def ranked(self, costs: Floats, limit: float) -> Rows:
        """Rows with costs below `limit`, cheapest first; ties go to the worker chosen longest ago."""
        rows = np.flatnonzero(costs < limit)
        return rows[np.lexsort((self.columns.turn[rows], costs[rows]))]
