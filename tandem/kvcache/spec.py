"""Layout of the layers' state in pages. Pure arithmetic, no tensors.

Layers with the same `StateSpec` form groups; every group has its own block table per request, and all groups draw
blocks from one pool. A block is a *page* of `page_bytes`, the same for every group: it holds the planes of `block_size`
tokens for the layers of the group it currently serves. So a page crosses the wire as one descriptor. Layers that read
another's state have none of their own and are not counted here.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tandem.architecture.state import StateSpec
from tandem.core.config import BLOCK_SIZES
from tandem.core.errors import ConfigurationError

_MOST_BYTES = 1.2  # of a token in all groups, as a multiple of the least possible, so that there are fewer groups
_LEAST_FILL, _NEARLY = 0.5, 0.9
_FAR = 1 << 40  # a position that no request reaches


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that share a block table: same spec, one page per block between them."""

    spec: StateSpec
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Division of a model's state into pages.

    Layout within a page: `[layer in group][plane]` and the plane's own shape; for K and V `[kv head][token][head_dim]`.
    """

    block_size: int
    groups: tuple[KVGroup, ...]
    least_page_bytes: int = 0  # of a stage of layers, where another one needs more

    @property
    def page_bytes(self) -> int:
        """Bytes of one block: those of the largest group, so that any block can serve any group."""
        sizes = (group.spec.block_bytes(self.block_size) * len(group.layers) for group in self.groups)
        return max(self.least_page_bytes, *sizes)

    @property
    def bytes_per_block(self) -> int:
        """What each further block of tokens adds to the hand-off of a request; nothing of layers with a window."""
        return self.page_bytes * max(1, sum(not group.spec.is_bounded for group in self.groups))

    @property
    def bytes_per_request(self) -> int:
        """What the hand-off of a request takes whatever its length: the pages of constant states."""
        return self.page_bytes * sum(group.spec.bytes_per_request > 0 for group in self.groups)

    @property
    def fill(self) -> float:
        """Share of its pages that a long request's state takes; 1 where it does not grow with the request."""
        sizes = [g.spec.block_bytes(self.block_size) * len(g.layers) for g in self.groups if not g.spec.is_bounded]
        return sum(sizes) / (self.page_bytes * len(sizes)) if sizes else 1.0

    @property
    def num_layers(self) -> int:
        return sum(len(group.layers) for group in self.groups)

    @property
    def is_bounded(self) -> bool:
        """Whether some group releases blocks while its request continues."""
        return any(group.spec.is_bounded for group in self.groups)

    @property
    def can_rewind(self) -> bool:
        """Whether a request may continue from fewer tokens than its blocks were computed for."""
        return all(group.spec.can_rewind for group in self.groups)

    def first_needed(self, group: int, position: int) -> int:
        """First block of a group that the query at `position` attends to."""
        return self.groups[group].spec.needed(position) // self.block_size

    def publishable(self, group: int, first: int, end: int) -> range:
        """Indices of a group's blocks in `[first, end)` that can be reused once computed."""
        return self.groups[group].spec.publishable(first, end, self.block_size)

    def stored(self, group: int, first: int, end: int) -> Sequence[int]:
        """Indices of a group's blocks in `[first, end)` that need memory if a cursor stops in the last of them."""
        kept = self.publishable(group, first, end)
        return kept if first == end or end - 1 in kept else (*kept, end - 1)

    def group_of_layer(self, layer: int) -> tuple[int, int]:
        """(group index, index of `layer` within the group)."""
        for index, group in enumerate(self.groups):
            if layer in group.layers:
                return index, group.layers.index(layer)
        raise KeyError(layer)

    def blocks_for(self, num_tokens: int, max_chunk_tokens: int) -> int:
        """Maximum number of blocks that one request holds at once while its cursor moves to `num_tokens` in chunks of
        at most `max_chunk_tokens`. A bounded group holds at most one query's window and the chunk being computed.
        """
        return sum(self.blocks_for_group(index, num_tokens, max_chunk_tokens) for index in range(len(self.groups)))

    def blocks_for_group(self, group: int, num_tokens: int, max_chunk_tokens: int) -> int:
        """Share of one group in `blocks_for`."""
        return self.groups[group].spec.most_blocks(num_tokens, max_chunk_tokens, self.block_size)


def build_layout(specs: Sequence[StateSpec], block_size: int) -> KVLayout:
    """Group layers by spec into groups of similar page size.

    A model of 22 local and 4 global layers of the same size becomes seven groups (five of 4 and one of 2 local layers,
    one of 4 global); where a local layer is half as large, four (two of 8 and one of 6, one of 4 global).

    Args:
        specs: state specs of the layers that keep state.

    Raises:
        ConfigurationError: no backend supports the block size.
    """
    if block_size not in BLOCK_SIZES:
        raise ConfigurationError(f"block_size={block_size} is not served; choose one of {BLOCK_SIZES}")
    layers_by_spec: dict[StateSpec, list[int]] = {}
    for layer, spec in enumerate(specs):
        layers_by_spec.setdefault(spec, []).append(layer)
    page_bytes = _page_bytes({spec: len(layers) for spec, layers in layers_by_spec.items()}, block_size)
    groups = [
        KVGroup(spec, tuple(layers[start : start + page_bytes // spec.block_bytes(block_size)]))
        for spec, layers in sorted(layers_by_spec.items(), key=lambda item: _reach(item[0]))
        for start in range(0, len(layers), page_bytes // spec.block_bytes(block_size))
    ]
    return KVLayout(block_size, tuple(groups))


def fuller_layout(specs: Sequence[StateSpec], layout: KVLayout) -> KVLayout | None:
    """The layout of larger blocks, the smallest that are nearly as full as any, where `layout` leaves half of its pages
    empty: a page is as large as one layer's recurrent state. None = its pages are full enough.
    """
    if layout.fill >= _LEAST_FILL:
        return None
    others = [build_layout(specs, size) for size in BLOCK_SIZES if size > layout.block_size]
    fullest = max((other.fill for other in others), default=0.0)
    return next((other for other in others if other.fill >= _NEARLY * fullest and other.fill > layout.fill), None)


def _page_bytes(counts: Mapping[StateSpec, int], block_size: int) -> int:
    """Chooses the bytes of one page, given the number of layers of each spec.

    Pages of full-attention layers are as full as possible, since these layers keep every token. Among such sizes, the
    one with the fewest groups whose pages take at most a fifth more memory than necessary is chosen.
    """

    def num_groups(spec: StateSpec, size: int) -> int:
        return math.ceil(counts[spec] / (size // spec.block_bytes(block_size)))

    def num_bytes(size: int, specs: Sequence[StateSpec]) -> int:
        return size * sum(num_groups(spec, size) for spec in specs)

    specs = list(counts)
    least = max(spec.block_bytes(block_size) for spec in specs)
    sizes = {spec.block_bytes(block_size) * count for spec in specs for count in range(1, counts[spec] + 1)}
    sizes = {size for size in sizes if size >= least}
    unbounded = [spec for spec in specs if not spec.is_bounded]
    fullest = min(num_bytes(size, unbounded) for size in sizes)
    sizes = {size for size in sizes if num_bytes(size, unbounded) == fullest}
    most_bytes = _MOST_BYTES * min(num_bytes(size, specs) for size in sizes)
    sizes = {size for size in sizes if num_bytes(size, specs) <= most_bytes}
    return min(sizes, key=lambda size: (sum(num_groups(spec, size) for spec in specs), num_bytes(size, specs)))


def _reach(spec: StateSpec) -> int:
    """Number of previous positions that a query attends to at most; 0 = all."""
    return _FAR - spec.needed(_FAR) + 1 if spec.is_bounded else 0
