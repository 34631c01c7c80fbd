"""Plans reads: checks lists of block indices and merges blocks that are adjacent on both sides into runs.

A plan of `plan_read` never touches the null block or memory outside either pool.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tandem.core.errors import TransportError
from tandem.transport.base import NULL_BLOCK


class Run(NamedTuple):
    """Copy of `num_blocks` adjacent blocks, from index `remote` on to index `local` on."""

    remote: int
    local: int
    num_blocks: int


Indices = NDArray[np.int64]


def check_pairs(
    remote_blocks: Sequence[int], local_blocks: Sequence[int], num_remote_blocks: int, num_local_blocks: int
) -> tuple[Indices, Indices]:
    """Returns the pairs as (remote, local), each [num_pairs], ordered by remote block so that runs are adjacent.

    Raises:
        TransportError: naming the first index that cannot be honoured.
    """
    if len(remote_blocks) != len(local_blocks) or len(remote_blocks) == 0:
        raise TransportError(
            f"{len(remote_blocks)} remote and {len(local_blocks)} local blocks: a read needs as many of each"
        )
    remote = _checked(remote_blocks, num_remote_blocks, "remote")
    local = _checked(local_blocks, num_local_blocks, "local")
    order = np.argsort(remote, kind="stable")
    return remote[order], local[order]


def plan_read(
    remote_blocks: Sequence[int], local_blocks: Sequence[int], num_remote_blocks: int, num_local_blocks: int
) -> list[Run]:
    """Returns the fewest runs that cover the pairs, ordered by remote block. Raises `TransportError` for an index out
    of range, null or repeated, and for lists of different lengths.
    """
    remote, local = check_pairs(remote_blocks, local_blocks, num_remote_blocks, num_local_blocks)
    is_start = np.ones(len(remote) + 1, dtype=np.bool_)
    is_start[1:-1] = (remote[1:] - remote[:-1] != 1) | (local[1:] - local[:-1] != 1)
    bounds = np.flatnonzero(is_start)
    starts, counts = bounds[:-1], bounds[1:] - bounds[:-1]
    return list(map(Run._make, zip(remote[starts].tolist(), local[starts].tolist(), counts.tolist(), strict=True)))


def _checked(blocks: Sequence[int], num_blocks: int, side: str) -> Indices:
    indices = np.asarray(blocks)
    if indices.ndim != 1 or indices.dtype.kind not in "iu":
        raise TransportError(f"{side} blocks {str(blocks)[:80]} are not a list of block indices")
    outside = (indices <= NULL_BLOCK) | (indices >= num_blocks)
    if outside.any():
        raise TransportError(
            f"{side} block {indices[outside][0]} cannot be transferred: the pool's blocks are 1 to {num_blocks - 1}"
            " (0 is the null block)"
        )
    in_order = np.sort(indices)
    repeated = in_order[1:] == in_order[:-1]
    if repeated.any():
        raise TransportError(f"{side} block {in_order[1:][repeated][0]} is named more than once")
    return indices.astype(np.int64, copy=False)


def batches(runs: Sequence[Run], max_blocks: int) -> Iterator[list[Run]]:
    """Yields the runs in order, in groups of at most `max_blocks` blocks; longer runs are split."""
    batch: list[Run] = []
    room = max_blocks
    for run in runs:
        done = 0
        while done < run.num_blocks:
            count = min(room, run.num_blocks - done)
            batch.append(Run(run.remote + done, run.local + done, count))
            done, room = done + count, room - count
            if not room:
                yield batch
                batch, room = [], max_blocks
    if batch:
        yield batch
