"""Byte offsets of a block's contents in its pages. Pure arithmetic.

A block of a KV group has a part for each layer, and a part consists of *pieces* that lie in one page each: the whole
part, or the matrix of each head and what follows them. The block's pages are filled in order, `[kind of
piece][layer][number]`; a piece that does not fit into the rest of a page begins the next one. So unused bytes are only
at the end of a page.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import groupby

from tandem.architecture.state import Segment, StateSpec


@dataclass(frozen=True, slots=True)
class Pieces:
    """One kind of piece: each layer has `count` of them, of `num_bytes` each."""

    count: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class PageOffset:
    """A page of a block, by its number within the block, and the first byte there."""

    page: int
    start: int


def pieces_of(spec: StateSpec, block_size: int) -> tuple[Pieces, ...]:
    """The kinds of pieces of one layer.

    A segment that may be cut by heads has one piece a head. Neighbouring segments that may not are one piece together.
    """
    found = []
    for is_cut, run in groupby(spec.segments(block_size), key=lambda segment: segment.is_cut):
        if is_cut:
            found += [Pieces(segment.num_heads, segment.head_bytes) for segment in run]
        else:
            found.append(Pieces(1, sum(segment.num_bytes for segment in run)))
    return tuple(found)


@dataclass(frozen=True)
class BlockPlacement:
    """Offsets of all pieces of a block, which holds parts of `num_layers` layers in pages of `page_bytes`.

    No piece is larger than a page.
    """

    pieces: tuple[Pieces, ...]
    num_layers: int
    page_bytes: int

    @property
    def num_pages(self) -> int:
        return self._end.page + 1

    def place(self, kind: int, layer: int, number: int) -> PageOffset:
        """Returns the offset of piece `number` of a kind. `layer`: index of its layer in the group."""
        return self._place(kind, layer * self.pieces[kind].count + number)

    def per_page(self, kind: int) -> int:
        """The number of pieces of a kind in a page that is full of them."""
        return self._per_page(self.pieces[kind])

    def num_together(self, kind: int, layer: int, number: int) -> int:
        """The number of pieces of a kind from this one to the end of its page."""
        index = layer * self.pieces[kind].count + number
        num_first, per_page = self._num_first(kind), self.per_page(kind)
        return num_first - index if index < num_first else per_page - (index - num_first) % per_page

    def runs(self, kind: int) -> Iterator[tuple[PageOffset, int]]:
        """Yields, for each page with pieces of a kind, the offset of the first of them and their number."""
        index, count = 0, self.num_layers * self.pieces[kind].count
        while index < count:
            num = min(count - index, self.num_together(kind, 0, index))
            yield self._place(kind, index), num
            index += num

    def used_bytes(self, page: int) -> int:
        """The number of bytes in use at the beginning of a page; the rest means nothing."""
        return self._used[page]

    @cached_property
    def _starts(self) -> tuple[PageOffset, ...]:
        """The earliest offset of each kind, then the end of the last one."""
        starts = [PageOffset(0, 0)]
        for kind, pieces in enumerate(self.pieces):
            last = self._place_from(starts[-1], pieces, self.num_layers * pieces.count - 1)
            starts.append(PageOffset(last.page, last.start + pieces.num_bytes))
            assert starts[-1].start <= self.page_bytes, f"pieces of kind {kind} are larger than a page"
        return tuple(starts)

    @property
    def _end(self) -> PageOffset:
        return self._starts[-1]

    @cached_property
    def _used(self) -> tuple[int, ...]:
        used = [0] * self.num_pages
        for kind, pieces in enumerate(self.pieces):
            for place, num in self.runs(kind):
                used[place.page] = place.start + num * pieces.num_bytes
        return tuple(used)

    def _place(self, kind: int, index: int) -> PageOffset:
        return self._place_from(self._starts[kind], self.pieces[kind], index)

    def _place_from(self, start: PageOffset, pieces: Pieces, index: int) -> PageOffset:
        num_first, per_page = self._fitting(start, pieces), self._per_page(pieces)
        if index < num_first:
            return PageOffset(start.page, start.start + index * pieces.num_bytes)
        further, slot = divmod(index - num_first, per_page)
        return PageOffset(start.page + 1 + further, slot * pieces.num_bytes)

    def _num_first(self, kind: int) -> int:
        return self._fitting(self._starts[kind], self.pieces[kind])

    def _fitting(self, start: PageOffset, pieces: Pieces) -> int:
        return (self.page_bytes - start.start) // max(1, pieces.num_bytes)

    def _per_page(self, pieces: Pieces) -> int:
        return self.page_bytes // max(1, pieces.num_bytes)


@lru_cache(maxsize=1024)
def placement_of(spec: StateSpec, num_layers: int, block_size: int, page_bytes: int) -> BlockPlacement:
    """The placement of a block of `num_layers` layers that have the same kind of state."""
    return BlockPlacement(pieces_of(spec, block_size), num_layers, page_bytes)


def segment_places(segments: Sequence[Segment]) -> tuple[tuple[int, int], ...]:
    """For each segment, the kind of its pieces and its first byte in such a piece.

    The byte is 0 unless the piece holds several segments.
    """
    places, kind, start = [], -1, 0
    for index, segment in enumerate(segments):
        if index == 0 or segment.is_cut or segments[index - 1].is_cut:
            kind, start = kind + 1, 0
        places.append((kind, start))
        start += segment.num_bytes
    return tuple(places)
