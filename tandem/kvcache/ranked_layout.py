"""Layout of the KV on each rank of a worker, and which bytes two workers of different layouts have to exchange.

All ranks have the same blocks; a rank's pages have its own heads, and with pipeline stages the layers of its stage
only. State without heads, such as latents, is not divided: the ranks share one copy, as if there were one rank. A
rectangle is a range of layers, heads and blocks; a slice, the one that a rank pulls from one rank of the source
(`architecture.rectangles`). Pure arithmetic: bytes are named by their page of a block and their offset there.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, pairwise

from tandem.architecture.rectangles import Rectangle, Slice, head_range, plan_slices
from tandem.architecture.state import Segment
from tandem.architecture.tensors import MAX_RANKS
from tandem.kvcache.placement import BlockPlacement, PageOffset, segment_places
from tandem.kvcache.spec import KVGroup, KVLayout, build_layout
from tandem.kvcache.stage_layouts import stage_layouts

_LEAST_PIECE_BYTES = 128  # of a piece of one head; 2^31 of them are 256 GiB


def num_parts(layout: KVLayout, num_ranks: int) -> int:
    """Number of parts in which the ranks of a stage keep the state: 1, shared by all, if no plane has heads."""
    return num_ranks if any(group.spec.is_divided for group in layout.groups) else 1


Parts = tuple[int, tuple[int, ...]]
"""A worker's state, divided among so many ranks, in stages of so many layers that keep state; () = no stages."""


@dataclass(frozen=True, slots=True)
class PageCopy:
    """Copy of `num_bytes` from a page of one rank's block (`start`, at the source) to one of another (`to`, at the
    reader).
    """

    to: PageOffset
    start: PageOffset
    num_bytes: int


@dataclass(frozen=True)
class RankedLayout:
    """Layouts of the KV of a worker whose state is divided among `num_ranks` ranks. `whole`: its layout on one rank.

    Args:
        stages: numbers of layers with state in each stage of a pipeline, whose ranks follow one another; () = all
            ranks have parts of all layers.
    """

    whole: KVLayout
    num_ranks: int
    stages: tuple[int, ...] = ()

    @property
    def parts(self) -> Parts:
        """Division of the state among ranks. Workers with the same division have the same pages."""
        return self.num_ranks, self.stages

    @property
    def width(self) -> int:
        """Number of ranks of a stage, which divide the heads of a layer."""
        return self.num_ranks // max(1, len(self.stages))

    @cached_property
    def layout(self) -> KVLayout:
        """Layout of a rank that has all layers, without stages: all ranks have the same number of heads."""
        if self.width == 1:
            return self.whole
        specs = [group.spec.shard(self.width) for group in self._by_layer]
        return build_layout(specs, self.whole.block_size)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, equal on all ranks."""
        return self._of_stages[0].page_bytes

    def pages_per_block(self, group: int) -> int:
        """Number of pages of a group's blocks, equal on all ranks."""
        return self._of_stages[0].groups[group].pages_per_block

    def layout_of(self, rank: int) -> KVLayout:
        """Layout of one rank: all groups, with the layers of its stage counted from the stage's first; a group may have
        none.
        """
        return self._of_stages[rank // self.width]

    @cached_property
    def _spans(self) -> tuple[range, ...]:
        """Layers of each stage."""
        ends = [0, *accumulate(self.stages or (self.whole.num_layers,))]
        return tuple(range(first, end) for first, end in pairwise(ends))

    @cached_property
    def _of_stages(self) -> tuple[KVLayout, ...]:
        return stage_layouts(self.layout, self._spans) if self.stages else (self.layout,)

    @property
    def is_shared(self) -> bool:
        """Whether layers are grouped as on one rank, so that a block means the same whatever the number of ranks."""
        return [group.layers for group in self.layout.groups] == [group.layers for group in self.whole.groups]

    @cached_property
    def piece_bytes(self) -> int:
        """Bytes of a piece, the unit of reads between workers of different divisions. Any exchange is a whole number of
        pieces, whatever the two divisions. It follows from `whole` alone.

        It is the greatest common divisor of the sizes of all heads. Where that is below 128, the heads of a segment
        count in runs of `num_heads // gcd(num_heads, MAX_RANKS)`, which no division cuts: a width is a power of two up
        to `MAX_RANKS`, and divides the number of heads or is a multiple of it. Heads that may lie in different pages
        still count one by one.
        """
        if self._piece_of_one_head >= _LEAST_PIECE_BYTES:
            return self._piece_of_one_head
        return math.gcd(*map(_uncut_bytes, self._all_segments()))

    @property
    def has_joint_pieces(self) -> bool:
        """Whether some heads count in runs. In earlier releases none do, so the size of a piece differs from theirs."""
        return self.piece_bytes != self._piece_of_one_head

    @cached_property
    def _piece_of_one_head(self) -> int:
        return math.gcd(*(segment.head_bytes for segment in self._all_segments()))

    def used_bytes(self, group: int, rank: int) -> tuple[int, ...]:
        """Number of bytes in use at the beginning of each page of a rank's block in a KV group."""
        placement, num_pages = self.layout_of(rank).placement(group), self.pages_per_block(group)
        return tuple(placement.used_bytes(page) if page < placement.num_pages else 0 for page in range(num_pages))

    def rectangles(self, group: int, rank: int, blocks: range) -> list[Rectangle]:
        """Rectangles of state that a rank holds in these blocks of a group."""
        return [
            Rectangle(part.name, layers, head_range(part.num_heads, rank % self.width, self.width), blocks)
            for part in self._segments(self.whole.groups[group])
            for layers in _ranges(self.layout.groups[group].layers, self._spans[rank // self.width])
        ]

    def slices_from(self, source: "RankedLayout", group: int, blocks: range) -> list[Slice]:
        """Slices that each rank of this worker pulls from a source's ranks, all of which hold these blocks.

        Raises:
            IncompatiblePeerError: they do not hold all of it.
        """
        lacking = [self.rectangles(group, rank, blocks) for rank in range(self.num_ranks)]
        return plan_slices(lacking, [source.rectangles(group, rank, blocks) for rank in range(source.num_ranks)])

    def copies_of(self, found: Slice, source: "RankedLayout", group: int) -> Iterator[PageCopy]:
        """The copies that transfer a slice, the same for each of its blocks: for each layer, runs of heads that are
        contiguous at both workers.
        """
        ours, theirs = self._heads(group, found.destination, found.part), source._heads(group, found.source, found.part)
        for layer in found.part.layers:
            head = found.part.heads.start
            while head < found.part.heads.stop:
                (to, num_ours), (start, num_theirs) = ours.from_head(layer, head), theirs.from_head(layer, head)
                num = min(num_ours, num_theirs, found.part.heads.stop - head)
                yield PageCopy(to, start, num * ours.segment.head_bytes)
                head += num

    @cached_property
    def _by_layer(self) -> list[KVGroup]:
        groups = self.whole.groups
        return [groups[self.whole.group_of_layer(layer)[0]] for layer in range(self.whole.num_layers)]

    def _segments(self, group: KVGroup) -> tuple[Segment, ...]:
        return group.spec.segments(self.whole.block_size)

    def _all_segments(self) -> Iterator[Segment]:
        """Segments of every group on one rank."""
        return chain.from_iterable(map(self._segments, self.whole.groups))

    def _heads(self, group: int, rank: int, part: Rectangle) -> "_Heads":
        """Heads of the rectangle's segment that a rank has, with their places."""
        segments = self._segments(self.layout.groups[group])
        index = next(index for index, segment in enumerate(segments) if segment.name == part.plane)
        num_heads = self._segments(self.whole.groups[group])[index].num_heads
        first = head_range(num_heads, rank % self.width, self.width).start
        kind, offset = segment_places(segments)[index]
        layers = [layer for layer in self.layout.groups[group].layers if layer in self._spans[rank // self.width]]
        return _Heads(self.layout_of(rank).placement(group), tuple(layers), segments[index], kind, offset, first)


@dataclass(frozen=True, slots=True)
class _Heads:
    """Heads of one segment in a rank's block: its pieces are of kind `kind`, its bytes begin at `offset` in a piece.

    `first`: the whole model's head that the rank has as its first.
    """

    placement: BlockPlacement
    layers: tuple[int, ...]
    segment: Segment
    kind: int
    offset: int
    first: int

    def from_head(self, layer: int, head: int) -> tuple[PageOffset, int]:
        """Place of a head, numbered in the whole model, and the number of heads that are contiguous from it on, those
        of further layers included.
        """
        index, own = self.layers.index(layer), head - self.first
        if self.segment.is_cut:
            return self.placement.place(self.kind, index, own), self.placement.num_together(self.kind, index, own)
        piece = self.placement.place(self.kind, index, 0)
        place = PageOffset(piece.page, piece.start + self.offset + own * self.segment.head_bytes)
        return place, self.segment.num_heads - own


def _uncut_bytes(segment: Segment) -> int:
    """Bytes of the heads that lie together and on one rank in every division."""
    if segment.is_cut:
        return segment.head_bytes
    return segment.num_bytes // math.gcd(segment.num_heads, MAX_RANKS)


def _ranges(all_layers: tuple[int, ...], span: range) -> list[range]:
    """The ascending layer indices that lie in `span`, as few ranges as possible."""
    layers = [layer for layer in all_layers if layer in span]
    if not layers:
        return []
    ends = [0, *(i for i, (a, b) in enumerate(pairwise(layers), 1) if b != a + 1), len(layers)]
    return [range(layers[start], layers[end - 1] + 1) for start, end in pairwise(ends)]
