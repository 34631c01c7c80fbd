"""Layout of the state on each rank of a worker: the same blocks on all, whose pages have the rank's own heads.

Pure arithmetic: a page's bytes are named by their offsets. A whole page of one rank is the special case of one rank.
State without heads, such as latents, is that case too: the ranks of a worker share one copy of it. Where layers are
divided into stages, a rank's page has those of its own stage, in the groups of a worker that has all.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

from tandem.architecture.rectangles import Rectangle, Slice, head_range, plan_slices
from tandem.architecture.state import Segment
from tandem.kvcache.spec import KVGroup, KVLayout, build_layout


def num_parts(layout: KVLayout, num_ranks: int) -> int:
    """In how many parts so many ranks of a stage keep the state: one that all share where no plane has heads."""
    planes = (plane for group in layout.groups for plane in group.spec.planes)
    return num_ranks if any(plane.by_head for plane in planes) else 1


Parts = tuple[int, tuple[int, ...]]
"""A worker's state, divided among so many ranks, in stages of so many layers that keep state; () = no stages."""


@dataclass(frozen=True, slots=True)
class PageCopy:
    """`num_bytes` from a byte of a source's page to a byte of a reader's; both pages belong to one rank each."""

    to: int
    start: int
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
        """How the state is divided; workers with equal ones have equal pages."""
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

    @cached_property
    def page_bytes(self) -> int:
        """Of a block, the same on all ranks."""
        return max(layout.page_bytes for layout in self._of_stages)

    def layout_of(self, rank: int) -> KVLayout:
        """The rank's own: all groups with the layers of its stage, counted from its first; a group may have none."""
        if not self.stages:
            return self.layout
        return replace(self._of_stages[rank // self.width], least_page_bytes=self.page_bytes)

    @cached_property
    def _spans(self) -> tuple[range, ...]:
        """Layers of each stage."""
        ends = [0, *accumulate(self.stages or (self.whole.num_layers,))]
        return tuple(range(first, end) for first, end in pairwise(ends))

    @cached_property
    def _of_stages(self) -> tuple[KVLayout, ...]:
        return tuple(_within(self.layout, span) for span in self._spans)

    @property
    def is_shared(self) -> bool:
        """Whether layers are grouped as on one rank, so that workers of both widths mean the same by a block."""
        return [group.layers for group in self.layout.groups] == [group.layers for group in self.whole.groups]

    @cached_property
    def piece_bytes(self) -> int:
        """The largest size of which every head of every segment has a whole number, at whatever width."""
        return math.gcd(*(part.head_bytes for group in self.whole.groups for part in self._segments(group)))

    def used_bytes(self, group: int, rank: int) -> int:
        """Of the page of a rank's block in a KV group; the rest of a page means nothing."""
        found = self.layout_of(rank).groups[group]
        return found.spec.block_bytes(self.layout.block_size) * len(found.layers)

    def rectangles(self, group: int, rank: int, blocks: range) -> list[Rectangle]:
        """What a rank holds in these blocks of a group."""
        return [
            Rectangle(part.name, layers, head_range(part.num_heads, rank % self.width, self.width), blocks)
            for part in self._segments(self.whole.groups[group])
            for layers in _ranges(self.layout.groups[group].layers, self._spans[rank // self.width])
        ]

    def slices_from(self, source: "RankedLayout", group: int, blocks: range) -> list[Slice]:
        """What each rank of this worker pulls of a source's ranks, all of which hold these blocks.

        Raises:
            IncompatiblePeerError: they do not hold all of it.
        """
        lacking = [self.rectangles(group, rank, blocks) for rank in range(self.num_ranks)]
        return plan_slices(lacking, [source.rectangles(group, rank, blocks) for rank in range(source.num_ranks)])

    def copies_of(self, found: Slice, source: "RankedLayout", group: int) -> Iterator[PageCopy]:
        """The bytes of a slice, the same in each of its blocks: one copy for each layer, whose heads lie together."""
        part = found.part
        for layer in part.layers:
            head_bytes, to = self._place(group, found.destination, part.plane, layer, part.heads.start)
            _, start = source._place(group, found.source, part.plane, layer, part.heads.start)
            yield PageCopy(to, start, len(part.heads) * head_bytes)

    @cached_property
    def _by_layer(self) -> list[KVGroup]:
        groups = self.whole.groups
        return [groups[self.whole.group_of_layer(layer)[0]] for layer in range(self.whole.num_layers)]

    def _segments(self, group: KVGroup) -> tuple[Segment, ...]:
        return group.spec.segments(self.whole.block_size)

    def _place(self, group: int, rank: int, name: str, layer: int, head: int) -> tuple[int, int]:
        """Bytes of a head of that segment, and the offset of this one in the rank's page."""
        found = self.layout_of(rank).groups[group]
        start = found.layers.index(layer - self._spans[rank // self.width].start) * found.spec.block_bytes(
            self.layout.block_size
        )
        for own, whole in zip(self._segments(found), self._segments(self.whole.groups[group]), strict=True):
            if own.name == name:
                first = head_range(whole.num_heads, rank % self.width, self.width).start
                return own.head_bytes, start + (head - first) * own.head_bytes
            start += own.num_heads * own.head_bytes
        raise KeyError(name)


def _within(layout: KVLayout, span: range) -> KVLayout:
    """The layers of a span, counted from its first."""
    groups = (
        KVGroup(group.spec, tuple(layer - span.start for layer in group.layers if layer in span))
        for group in layout.groups
    )
    return replace(layout, groups=tuple(groups))


def _ranges(all_layers: tuple[int, ...], span: range) -> list[range]:
    """Those of ascending indices that lie in a span, as the fewest ranges."""
    layers = [layer for layer in all_layers if layer in span]
    if not layers:
        return []
    ends = [0, *(i for i, (a, b) in enumerate(pairwise(layers), 1) if b != a + 1), len(layers)]
    return [range(layers[start], layers[end - 1] + 1) for start, end in pairwise(ends)]
