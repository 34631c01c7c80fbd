"""Worker table: the workers of one role in columns, so that a decision weighs all with a few vector operations.

Invariant: row i of every column belongs to `snapshots[i]`. A worker that leaves is replaced by the last one, so a row
number is good until the next change only. Owned by one thread; decides nothing.
"""

from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from itertools import repeat

import numpy as np
from numpy.typing import NDArray

from tandem.routing.candidates import WorkerSnapshot, num_blocks_of
from tandem.routing.snapshot import Links, LinkState, Role

Floats = NDArray[np.float64]

_FIRST_CAPACITY = 16


@dataclass(frozen=True, slots=True)
class Columns:
    """Read-only inputs of a decision, one entry per worker. Names as in `WorkerSnapshot` and `WorkerState`.

    Args:
        does_both: 1 if the role is both.
        chunk_blocks: most blocks that one prefill step computes.
        prefill_*, decode_*: the calibrated speed.
        best_*: a bound that no measured link into the worker beats.
    """

    reported_at_s: Floats
    stale_from_s: Floats
    free_at_s: Floats
    joined_step_ms: Floats
    num_running: Floats
    num_awaiting_kv: Floats
    num_free_blocks: Floats
    num_total_blocks: Floats
    turn: Floats
    aside_until_s: Floats
    does_both: Floats
    chunk_blocks: Floats
    block_bytes: Floats
    request_bytes: Floats
    prefill_ms_per_request: Floats
    prefill_ms_per_token: Floats
    prefill_ms_per_pair: Floats
    decode_ms_per_request: Floats
    decode_ms_per_context_token: Floats
    best_bytes_per_s: Floats
    best_latency_ms: Floats


class WorkerTable:
    """Workers of one role. `links`: the source of `best_*`. `columns` is a new object after a worker came or went."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self.snapshots: list[WorkerSnapshot] = []
        self._row_of: dict[str, int] = {}
        self._cells = [array("d", bytes(8 * _FIRST_CAPACITY)) for _ in fields(Columns)]
        self._show()

    @staticmethod
    def of(snapshots: Iterable[WorkerSnapshot], links: Links) -> "WorkerTable":
        """Creates a table of these workers."""
        table = WorkerTable(links)
        for snapshot in snapshots:
            table.put(snapshot)
        return table

    def __len__(self) -> int:
        return len(self.snapshots)

    def row_of(self, worker_id: str) -> int | None:
        return self._row_of.get(worker_id)

    def put(self, snapshot: WorkerSnapshot) -> None:
        """Add a worker, or replace its snapshot."""
        row = self._row_of.get(snapshot.worker_id)
        if row is not None:
            self.snapshots[row] = snapshot
            self._write(row, snapshot)
            return
        row = self._row_of[snapshot.worker_id] = len(self.snapshots)
        self.snapshots.append(snapshot)
        if row >= len(self._cells[0]):
            self._cells = [cells + cells for cells in self._cells]
        self._write(row, snapshot)
        self._show()

    def drop(self, worker_id: str) -> None:
        """Remove a worker if it is there."""
        row = self._row_of.pop(worker_id, None)
        if row is None:
            return
        last = self.snapshots.pop()
        if last.worker_id != worker_id:
            self.snapshots[row] = last
            self._row_of[last.worker_id] = row
            self._write(row, last)
        self._show()

    def refresh_link(self, worker_id: str) -> None:
        """Update a worker's row after its best link has changed."""
        row = self._row_of.get(worker_id)
        if row is not None:
            self._write(row, self.snapshots[row])

    def scattered(self, values: Mapping[str, float], default: float = 0.0) -> Floats:
        """Column of `values` given by worker id, `default` for workers without one. Other ids are ignored."""
        num_rows, num_values = len(self.snapshots), len(values)
        column = np.empty(num_rows + 1)  # NOTE: the last cell receives the values of ids that are not in the table
        column.fill(default)
        rows = np.fromiter(map(self._row_of.get, values, repeat(num_rows)), np.intp, num_values)
        column[rows] = np.fromiter(values.values(), np.float64, num_values)
        return column[:num_rows]

    def _write(self, row: int, snapshot: WorkerSnapshot) -> None:
        best = self._links.best_into.get(snapshot.worker_id, self._links.default)
        for cells, value in zip(self._cells, _values(snapshot, best), strict=True):
            cells[row] = value

    def _show(self) -> None:
        """Set `columns` to views of the cells in use."""
        num_rows = len(self.snapshots)
        self.columns = Columns(*(np.frombuffer(cells, np.float64, num_rows) for cells in self._cells))


def _values(snapshot: WorkerSnapshot, best: LinkState) -> tuple[float, ...]:
    """A worker's row, in the order of `Columns`."""
    worker, prefill, decode = snapshot.worker, snapshot.speed.prefill, snapshot.speed.decode
    return (
        snapshot.reported_at_s,
        snapshot.stale_from_s,
        snapshot.free_at_s,
        snapshot.joined_step_ms,
        snapshot.num_running,
        snapshot.num_awaiting_kv,
        snapshot.num_free_blocks,
        snapshot.num_total_blocks,
        snapshot.turn,
        snapshot.aside_until_s,
        worker.role is Role.BOTH,
        num_blocks_of(worker.chunk_tokens, worker.block_size),
        worker.block_bytes,
        worker.request_bytes,
        prefill.ms_per_request,
        prefill.ms_per_token,
        prefill.ms_per_pair,
        decode.ms_per_request,
        decode.ms_per_context_token,
        best.bytes_per_s,
        best.latency_ms,
    )
