"""Layout of the state on each rank of a worker: the same blocks on all, whose pages have the rank's own heads.

Pure arithmetic: bytes are named by their page of a block and their offset there. A whole page of one rank is the
special case of one rank.
State without heads, such as latents, is that case too: the ranks of a worker share one copy of it. Where layers are
divided into stages, a rank's pages have those of its own stage, in the groups of a worker that has all.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

from tandem.architecture.rectangles import Rectangle, Slice, head_range, plan_slices
from tandem.architecture.state import Segment
from tandem.kvcache.placement import BlockPlacement, PageOffset, segment_places
from tandem.kvcache.spec import KVGroup, KVLayout, build_layout
from tandem.kvcache.stage_layouts import stage_layouts


def num_parts(layout: KVLayout, num_ranks: int) -> int:
    """In how many parts so many ranks of a stage keep the state: one that all share where no plane has heads."""
    return num_ranks if any(group.spec.is_divided for group in layout.groups) else 1


Parts = tuple[int, tuple[int, ...]]
"""A worker's state, divided among so many ranks, in stages of so many layers that keep state; () = no stages."""


@dataclass(frozen=True, slots=True)
class PageCopy:
    """`num_bytes` from a source's page to a reader's, each a page of one rank's block."""

    to: PageOffset
    start: PageOffset
    num_bytes: int


@dataclass(frozen=True)
class RankedLayout:
    """The layout of each of `num_ranks` ranks that have a part of the state each, given that of a worker of one.

    Args:
        stages: numbers of layers with state in each stage of a pipeline, whose ranks follow one another; () = all
            ranks have parts of all layers.
    """

    whole: KVLayout
    num_ranks: int
    stages: tuple[int, ...] = ()

    @property
    def parts(self) -> Parts:
        """Division of the state among ranks; workers with equal ones have equal pages."""
        return self.num_ranks, self.stages

    @property
    def width(self) -> int:
        """Ranks that divide the heads of a layer."""
        return self.num_ranks // max(1, len(self.stages))

    @cached_property
    def layout(self) -> KVLayout:
        """Of a rank that has all layers: all have the same number of heads."""
        if self.width == 1:
            return self.whole
        specs = [group.spec.shard(self.width) for group in self._by_layer]
        return build_layout(specs, self.whole.block_size)

    @property
    def page_bytes(self) -> int:
        """The same on all ranks."""
        return self._of_stages[0].page_bytes

    def pages_per_block(self, group: int) -> int:
        """The same on all ranks."""
        return self._of_stages[0].groups[group].pages_per_block

    def layout_of(self, rank: int) -> KVLayout:
        """The rank's own: all groups with the layers of its stage, counted from its first; a group may have none."""
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
        """Whether layers are grouped as on one rank, so that workers of both widths mean the same by a block."""
        return [group.layers for group in self.layout.groups] == [group.layers for group in self.whole.groups]

    @cached_property
    def piece_bytes(self) -> int:
        """The largest size of which every head of every segment has a whole number, at whatever width."""
        return math.gcd(*(part.head_bytes for group in self.whole.groups for part in self._segments(group)))

    def used_bytes(self, group: int, rank: int) -> tuple[int, ...]:
        """Of each page of a rank's block in a KV group; the rest of a page means nothing."""
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
        """The bytes of a slice, the same in each of its blocks: of each layer as many heads at a time as lie together
        on both sides.
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

    def _heads(self, group: int, rank: int, part: Rectangle) -> "_Heads":
        """Heads that a rank has of the rectangle's segment, with their places."""
        segments = self._segments(self.layout.groups[group])
        index = next(index for index, segment in enumerate(segments) if segment.name == part.plane)
        num_heads = self._segments(self.whole.groups[group])[index].num_heads
        first = head_range(num_heads, rank % self.width, self.width).start
        kind, offset = segment_places(segments)[index]
        layers = [layer for layer in self.layout.groups[group].layers if layer in self._spans[rank // self.width]]
        return _Heads(self.layout_of(rank).placement(group), tuple(layers), segments[index], kind, offset, first)


@dataclass(frozen=True, slots=True)
class _Heads:
    """The heads of one segment in a rank's block: its pieces are of that kind, and its bytes begin at `offset` there.

    `first`: the whole model's head that the rank has as its first.
    """

    placement: BlockPlacement
    layers: tuple[int, ...]
    segment: Segment
    kind: int
    offset: int
    first: int

    def from_head(self, layer: int, head: int) -> tuple[PageOffset, int]:
        """Place of a head of the whole model, and the number of heads that lie together from it on, those of further
        layers too.
        """
        index, own = self.layers.index(layer), head - self.first
        if self.segment.is_cut:
            return self.placement.place(self.kind, index, own), self.placement.num_together(self.kind, index, own)
        piece = self.placement.place(self.kind, index, 0)
        place = PageOffset(piece.page, piece.start + self.offset + own * self.segment.head_bytes)
        return place, self.segment.num_heads - own


def _ranges(all_layers: tuple[int, ...], span: range) -> list[range]:
    """Those of ascending indices that lie in a span, as the fewest ranges."""
    layers = [layer for layer in all_layers if layer in span]
    if not layers:
        return []
    ends = [0, *(i for i, (a, b) in enumerate(pairwise(layers), 1) if b != a + 1), len(layers)]
    return [range(layers[start], layers[end - 1] + 1) for start, end in pairwise(ends)]
