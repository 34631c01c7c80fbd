"""Translates reads of blocks into reads of pool units, between workers of any numbers of ranks.

A pool of several ranks has the blocks of rank 0, then those of rank 1, and so on. A unit is a page, or a piece of one
(`base.Peer.unit_bytes`). If both workers divide state alike (same number of ranks, same stages), the same blocks of
every rank are read as whole pages. Otherwise slices of pages are read in pieces, with one read for each rank of the
reader.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby

import numpy as np
from numpy.typing import NDArray

from tandem.core.errors import IncompatiblePeerError, TransportError
from tandem.kvcache.ranked_layout import RankedLayout
from tandem.transport.base import NULL_BLOCK, Peer

Entry = tuple[int, int]  # KV group, index in the block table
Pages = tuple[int, ...]  # of one block
_Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RankedRead:
    """Arguments of one `KVTransport.read`: units at the peer, and the local units that they are copied into."""

    remote: Sequence[int]
    local: Sequence[int]


class Resharding:
    """Translates reads of a peer's blocks into reads of pages or slices of pages.

    Args:
        reader: layout of this worker, which reads.
        num_blocks: number of blocks on each of its ranks, the null block included.
        peer: connection to the worker that is read.

    Raises:
        IncompatiblePeerError: the peer's pool is not that of so many ranks.
    """

    def __init__(self, reader: RankedLayout, num_blocks: int, peer: Peer) -> None:
        self._reader, self._num_blocks = reader, num_blocks
        self._source = RankedLayout(reader.whole, *peer.parts)
        self._unit_bytes = peer.unit_bytes
        page_bytes = self._source.page_bytes
        self._num_remote_blocks, rest = divmod(peer.num_blocks * peer.unit_bytes, page_bytes * peer.num_ranks)
        if rest or page_bytes % peer.unit_bytes:
            raise IncompatiblePeerError(
                f"peer {peer.incarnation} has {peer.num_blocks} times {peer.unit_bytes} bytes on {peer.num_ranks} "
                f"ranks, which are not blocks of {page_bytes} bytes"
            )

    @property
    def num_remote_blocks(self) -> int:
        """Number of blocks on each rank of the peer, the null block included."""
        return self._num_remote_blocks

    def reads(self, entries: Sequence[Entry], remote: Sequence[Pages], local: Sequence[Pages]) -> list[RankedRead]:
        """The reads that copy block `remote[i]` into block `local[i]` on all ranks. `entries[i]`: the KV group and
        block table index of the block; in order.

        Raises:
            TransportError: a page is not one of a rank's, or a block has another number of them.
        """
        theirs = _checked(entries, remote, self._source, self._num_remote_blocks, "remote")
        ours = _checked(entries, local, self._reader, self._num_blocks, "local")
        if self._source.parts == self._reader.parts:
            ranks = np.arange(self._reader.num_ranks)[:, None]
            return [_read(ranks * self._num_remote_blocks + theirs, ranks * self._num_blocks + ours)]
        found: list[list[tuple[_Indices, _Indices]]] = [[] for _ in range(self._reader.num_ranks)]
        at_theirs = at_ours = 0
        for group, index, count in _runs(entries):
            num_theirs, num_ours = (count * side.pages_per_block(group) for side in (self._source, self._reader))
            blocks = theirs[at_theirs : at_theirs + num_theirs], ours[at_ours : at_ours + num_ours]
            for rank, *part in self._slices(group, index, *(pages.reshape(count, -1) for pages in blocks)):
                found[rank].append((part[0], part[1]))
            at_theirs, at_ours = at_theirs + num_theirs, at_ours + num_ours
        return [_read(*map(np.concatenate, zip(*parts, strict=True))) for parts in found if parts]

    def read_of_pages(self, remote: Sequence[int], local: Sequence[int]) -> RankedRead:
        """The read of whole pages of every rank, whatever is in them, from a peer with the same division among ranks.

        Raises:
            TransportError: a page is not one of a rank's, or the peer has other ranks or stages.
        """
        if self._source.parts != self._reader.parts:
            raise TransportError(f"whole pages of {self._source.num_ranks} ranks mean nothing here")
        theirs = _within(np.array(remote, dtype=np.int64), self._num_remote_blocks, "remote")
        ours = _within(np.array(local, dtype=np.int64), self._num_blocks, "local")
        ranks = np.arange(self._reader.num_ranks)[:, None]
        return _read(ranks * self._num_remote_blocks + theirs, ranks * self._num_blocks + ours)

    def reads_of_any(self, local: Sequence[int]) -> list[RankedRead]:
        """Reads of arbitrary blocks of the peer into blocks made of these pages, to measure the link; none if they make
        no block.
        """
        num_theirs, num_ours = (side.pages_per_block(0) for side in (self._source, self._reader))
        count = min(len(local) // num_ours, (self._num_remote_blocks - 1) // num_theirs)
        if not count:
            return []
        remote = [tuple(range(1 + i * num_theirs, 1 + (i + 1) * num_theirs)) for i in range(count)]
        own = [tuple(local[i * num_ours : (i + 1) * num_ours]) for i in range(count)]
        return self.reads([(0, index) for index in range(count)], remote, own)

    def _slices(
        self, group: int, index: int, theirs: _Indices, ours: _Indices
    ) -> Iterator[tuple[int, _Indices, _Indices]]:
        """Yields (rank of the reader, remote units, local units) for a group's blocks [num_blocks, pages_per_block],
        which are consecutive from `index` on.
        """
        for found in self._reader.slices_from(self._source, group, range(index, index + len(ours))):
            span = slice(found.part.blocks.start - index, found.part.blocks.stop - index)
            remote = self._first_units(self._source, found.source * self._num_remote_blocks + theirs[span])
            local = self._first_units(self._reader, found.destination * self._num_blocks + ours[span])
            for copy in self._reader.copies_of(found, self._source, group):
                units = np.arange(copy.num_bytes // self._unit_bytes)
                theirs_at = remote[:, copy.start.page, None] + (copy.start.start // self._unit_bytes + units)
                ours_at = local[:, copy.to.page, None] + (copy.to.start // self._unit_bytes + units)
                yield found.destination, theirs_at.ravel(), ours_at.ravel()

    def _first_units(self, side: RankedLayout, blocks: _Indices) -> _Indices:
        return blocks * (side.page_bytes // self._unit_bytes)


def _read(remote: _Indices, local: _Indices) -> RankedRead:
    return RankedRead(remote.ravel().tolist(), local.ravel().tolist())


def _runs(entries: Sequence[Entry]) -> Iterator[tuple[int, int, int]]:
    """(KV group, index, number) of consecutive blocks of one group."""
    numbered = enumerate(entries)
    for _, run in groupby(numbered, key=lambda each: (each[1][0], each[1][1] - each[0])):
        found = [entry for _, entry in run]
        yield *found[0], len(found)


def _checked(
    entries: Sequence[Entry], blocks: Sequence[Pages], layout: RankedLayout, num_blocks: int, side: str
) -> _Indices:
    """The pages of all blocks. NOTE: beyond the pages of one rank lie those of the next, where a transport would not
    notice.
    """
    for (group, index), pages in zip(entries, blocks, strict=True):
        if len(pages) != (expected := layout.pages_per_block(group)):
            raise TransportError(
                f"{side} block {index} of KV group {group} cannot be transferred: it has {len(pages)} pages, "
                f"not {expected}"
            )
    return _within(np.fromiter(chain.from_iterable(blocks), dtype=np.int64), num_blocks, side)


def _within(found: _Indices, num_blocks: int, side: str) -> _Indices:
    outside = (found <= NULL_BLOCK) | (found >= num_blocks)
    if outside.any():
        raise TransportError(
            f"{side} block {found[outside][0]} cannot be transferred: the blocks of a rank are 1 to {num_blocks - 1}"
        )
    return found
