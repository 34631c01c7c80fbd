"""Layout of the layers' KV and other state in pages. Pure arithmetic, no tensors.

Layers with the same `StateSpec` form groups; every group has its own block table per request, and all groups draw
*pages* of `page_bytes` from one pool. A block holds the state of `block_size` tokens for the layers of its group. It is
one page, so that it crosses the wire as one descriptor. A block of constant (recurrent) states may be much larger than
one of K and V, and has as many pages as it needs (`placement`): the page size is chosen for layers whose state grows
with the request. Layers that read another layer's state have none of their own and are not counted here.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tandem.architecture.state import StateSpec
from tandem.core.config import BLOCK_SIZES
from tandem.core.errors import ConfigurationError
from tandem.kvcache.placement import BlockPlacement, pieces_of, placement_of

_MOST_BYTES = 1.2  # of a token in all groups, as a multiple of the least possible, so that there are fewer groups
_MOST_PADDING = 1.02  # of pages of layers that keep every token, so that pieces of constant states fill theirs better
_FAR = 1 << 40  # a position that no request reaches


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that share a block table: they have the same spec, and their blocks have `pages_per_block` pages."""

    spec: StateSpec
    layers: tuple[int, ...]
    pages_per_block: int = 1


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Division of a model's state into pages.

    Layout within a block of one page: `[layer in group][plane]` and the plane's own shape; for K and V
    `[kv head][token][head_dim]`. Within one of several: see `placement`.

    Args:
        page_bytes: the same for every group, so that any page can serve any group.
    """

    block_size: int
    groups: tuple[KVGroup, ...]
    page_bytes: int

    @property
    def bytes_per_block(self) -> int:
        """Bytes that each further block of tokens adds to the transfer of a request's KV. Layers with a window add
        none, unless all other layers are recurrent.
        """
        has_tokens = any(not group.spec.is_constant for group in self.groups)
        return self.page_bytes * max(has_tokens, sum(not group.spec.is_bounded for group in self.groups))

    @property
    def bytes_per_request(self) -> int:
        """Bytes of the transfer of a request's KV that do not depend on its length: pages of constant states."""
        return self.page_bytes * sum(group.pages_per_block for group in self.groups if group.spec.bytes_per_request)

    @property
    def fill(self) -> float:
        """Share of a page that is in use, for groups that grow with the request; 1 if there are none."""
        sizes = [g.spec.block_bytes(self.block_size) * len(g.layers) for g in self.groups if not g.spec.is_bounded]
        return sum(sizes) / (self.page_bytes * len(sizes)) if sizes else 1.0

    def placement(self, group: int) -> BlockPlacement:
        """Placement of the parts of a group's blocks in pages."""
        found = self.groups[group]
        return placement_of(found.spec, len(found.layers), self.block_size, self.page_bytes)

    @property
    def num_layers(self) -> int:
        return sum(len(group.layers) for group in self.groups)

    @property
    def is_bounded(self) -> bool:
        """Whether some group releases blocks while its request continues."""
        return any(group.spec.is_bounded for group in self.groups)

    @property
    def can_rewind(self) -> bool:
        """Whether a request can continue from fewer tokens than its blocks were computed for; recurrent states
        cannot.
        """
        return all(group.spec.can_rewind for group in self.groups)

    def num_blocks(self, num_tokens: int) -> int:
        """Number of blocks that hold so many tokens, the last one perhaps partly filled."""
        return math.ceil(num_tokens / self.block_size)

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
        """Maximum number of pages that one request holds at once while its cursor moves to `num_tokens` in chunks of
        at most `max_chunk_tokens`. A bounded group holds at most one query's window and the chunk being computed.
        """
        return sum(self.blocks_for_group(index, num_tokens, max_chunk_tokens) for index in range(len(self.groups)))

    def token_blocks(self, num_pages: int, num_tokens: int, max_chunk_tokens: int) -> int:
        """Number of blocks of tokens that `num_pages` hold for requests of `num_tokens`: one a page, unless every group
        is bounded. Then a long request takes no more pages than a shorter one.
        """
        if not all(group.spec.is_bounded for group in self.groups):
            return num_pages
        num_blocks = math.ceil(num_tokens / self.block_size)
        return num_pages * num_blocks // self.blocks_for(num_tokens, max_chunk_tokens)

    def blocks_for_group(self, group: int, num_tokens: int, max_chunk_tokens: int) -> int:
        """The pages of one group in `blocks_for`."""
        found = self.groups[group]
        return found.pages_per_block * found.spec.most_blocks(num_tokens, max_chunk_tokens, self.block_size)


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
    groups: list[KVGroup] = []
    for spec, layers in sorted(layers_by_spec.items(), key=lambda item: _reach(item[0])):
        if spec.is_constant:
            num_pages = placement_of(spec, len(layers), block_size, page_bytes).num_pages
            groups.append(KVGroup(spec, tuple(layers), num_pages))
        else:
            size = page_bytes // spec.block_bytes(block_size)
            groups += [KVGroup(spec, tuple(layers[start : start + size])) for start in range(0, len(layers), size)]
    return KVLayout(block_size, tuple(groups), page_bytes)


def _page_bytes(counts: Mapping[StateSpec, int], block_size: int) -> int:
    """Chooses the page size in bytes, given the number of layers of each spec.

    Pages of full-attention layers are as full as possible, since these layers keep every token; nearly so, where a
    whole number of a constant state's pieces then fills a page. Among such sizes, the one with the fewest pages whose
    size in total is at most a fifth more than necessary is chosen. Where every layer keeps a constant state, that is
    all of it.
    """

    def num_pages(spec: StateSpec, size: int) -> int:
        if spec.is_constant:
            return placement_of(spec, counts[spec], block_size, size).num_pages
        return math.ceil(counts[spec] / (size // spec.block_bytes(block_size)))

    def num_bytes(size: int, specs: Sequence[StateSpec]) -> int:
        return size * sum(num_pages(spec, size) for spec in specs)

    specs = list(counts)
    least = max(pieces.num_bytes for spec in specs for pieces in pieces_of(spec, block_size))
    by_token = [spec for spec in specs if not spec.is_constant] or specs
    sizes = {spec.block_bytes(block_size) * count for spec in by_token for count in range(1, counts[spec] + 1)}
    sizes = {size for size in sizes if size >= least} or {least}
    unbounded = [spec for spec in specs if not spec.is_bounded]
    fullest = min(num_bytes(size, unbounded) for size in sizes)
    pieces = {each.num_bytes for spec in specs if spec.is_constant for each in pieces_of(spec, block_size)}
    sizes |= {math.ceil(size / each) * each for size in sizes for each in pieces if each}
    most_padded = _MOST_PADDING * fullest if pieces else fullest
    sizes = {size for size in sizes if num_bytes(size, unbounded) <= most_padded}
    most_bytes = _MOST_BYTES * min(num_bytes(size, specs) for size in sizes)
    sizes = {size for size in sizes if num_bytes(size, specs) <= most_bytes}
    return min(sizes, key=lambda size: (sum(num_pages(spec, size) for spec in specs), num_bytes(size, specs)))


def _reach(spec: StateSpec) -> int:
    """Number of previous positions that a query attends to at most; 0 = all."""
    return _FAR - spec.needed(_FAR) + 1 if spec.is_bounded else 0
