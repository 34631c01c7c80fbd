"""Placement of the parts of a block in its pages. Pure arithmetic.

A block of a KV group has a part of each layer, and a part consists of pieces that lie in one page each: the whole
part, or the matrix of each head and what follows them. The block's pages are filled in order, `[kind of
piece][layer][number]`; a piece that does not fit into the rest of a page begins the next one, so no page has a gap
before its end.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import groupby

from tandem.architecture.state import Segment, StateSpec


@dataclass(frozen=True, slots=True)
class Pieces:
    """Pieces of one kind: of each layer `count` of `num_bytes`."""

    count: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class PageOffset:
    """A page of a block, by its number within the block, and the first byte there."""

    page: int
    start: int


def pieces_of(spec: StateSpec, block_size: int) -> tuple[Pieces, ...]:
    """By kind, those of one layer: a segment that may be cut has one a head, others in a row are one together."""
    found = []
    for is_cut, run in groupby(spec.segments(block_size), key=lambda segment: segment.is_cut):
        if is_cut:
            found += [Pieces(segment.num_heads, segment.head_bytes) for segment in run]
        else:
            found.append(Pieces(1, sum(segment.num_bytes for segment in run)))
    return tuple(found)


@dataclass(frozen=True)
class BlockPlacement:
    """Places of the pieces of a block that has parts of `num_layers` layers, in pages of `page_bytes`.

    No piece is larger than a page.
    """

    pieces: tuple[Pieces, ...]
    num_layers: int
    page_bytes: int

    @property
    def num_pages(self) -> int:
        return self._end.page + 1

    def place(self, kind: int, layer: int, number: int) -> PageOffset:
        """Of piece `number` of a kind, of the layer with index `layer` in the group."""
        return self._place(kind, layer * self.pieces[kind].count + number)

    def per_page(self, kind: int) -> int:
        """Most pieces of a kind that lie in one page."""
        return self._per_page(self.pieces[kind])

    def num_together(self, kind: int, layer: int, number: int) -> int:
        """Pieces of a kind that lie in one page from this one on."""
        index = layer * self.pieces[kind].count + number
        num_first, per_page = self._num_first(kind), self.per_page(kind)
        return num_first - index if index < num_first else per_page - (index - num_first) % per_page

    def runs(self, kind: int) -> Iterator[tuple[PageOffset, int]]:
        """Each page that has pieces of a kind: the first of them, and how many there are."""
        index, count = 0, self.num_layers * self.pieces[kind].count
        while index < count:
            num = min(count - index, self.num_together(kind, 0, index))
            yield self._place(kind, index), num
            index += num

    def used_bytes(self, page: int) -> int:
        """Of a page of the block; the rest of it means nothing."""
        return self._used[page]

    @cached_property
    def _starts(self) -> tuple[PageOffset, ...]:
        """Where each kind begins at the earliest, and the end."""
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
    """Of a block of `num_layers` layers that keep the same state."""
    return BlockPlacement(pieces_of(spec, block_size), num_layers, page_bytes)


def segment_places(segments: Sequence[Segment]) -> tuple[tuple[int, int], ...]:
    """Of each segment, the kind of its pieces, and its first byte in the piece where that holds several segments."""
    places, kind, start = [], -1, 0
    for index, segment in enumerate(segments):
        if index == 0 or segment.is_cut or segments[index - 1].is_cut:
            kind, start = kind + 1, 0
        places.append((kind, start))
        start += segment.num_bytes
    return tuple(places)
