"""Layout of the layers' state in pages. Pure arithmetic, no tensors.

Layers with the same `KVSpec` form groups; every group has its own block table per request, and all groups draw blocks
from one pool. A block is a *page* of `page_bytes`, the same for every group: it holds `block_size` tokens of K and V
for the `num_layers` layers of the group it currently serves. So a page crosses the wire as one descriptor. Layers that
read another's state have none of their own and are not counted here.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tandem.architecture.state import KVSpec
from tandem.core.errors import ConfigurationError

SUPPORTED_BLOCK_SIZES = (8, 16, 32, 64, 128)
_MOST_BYTES = 1.2  # of a token in all groups, as a multiple of the least possible, so that there are fewer groups


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that share a block table: same spec, one page per block between them."""

    spec: KVSpec
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KVLayout:
    """How a model's KV is cut into pages. Within a page: `[layer in group][K|V][kv head][token][head_dim]`."""

    block_size: int
    groups: tuple[KVGroup, ...]

    @property
    def page_bytes(self) -> int:
        """Bytes of one block: the largest group's need, so that any block can serve any group."""
        return max(g.spec.bytes_per_token * len(g.layers) for g in self.groups) * self.block_size

    @property
    def num_layers(self) -> int:
        return sum(len(group.layers) for group in self.groups)

    def group_of_layer(self, layer: int) -> tuple[int, int]:
        """(group index, index of `layer` within the group)."""
        for index, group in enumerate(self.groups):
            if layer in group.layers:
                return index, group.layers.index(layer)
        raise KeyError(layer)

    def blocks_for(self, num_tokens: int, max_chunk_tokens: int) -> int:
        """The most blocks that one request holds at once while its cursor goes to `num_tokens` in chunks of at most
        `max_chunk_tokens`. A windowed group never holds more than its window and the chunk being computed.
        """
        return sum(self.blocks_for_group(index, num_tokens, max_chunk_tokens) for index in range(len(self.groups)))

    def blocks_for_group(self, group: int, num_tokens: int, max_chunk_tokens: int) -> int:
        """What `blocks_for` counts for one group."""
        spec = self.groups[group].spec
        whole = math.ceil(num_tokens / self.block_size)
        if spec.window is None:
            return whole
        return min(whole, math.ceil((spec.window - 1 + max_chunk_tokens) / self.block_size) + 1)


def build_layout(specs: Sequence[KVSpec], block_size: int) -> KVLayout:
    """Group layers by spec into groups of similar page size.

    A model of 22 local and 4 global layers of the same size becomes seven groups (five of 4 and one of 2 local layers,
    one of 4 global); where a local layer is half as large, four (two of 8 and one of 6, one of 4 global).

    Args:
        specs: of the layers that keep state.

    Raises:
        ConfigurationError: for a block size that no backend serves.
    """
    if block_size not in SUPPORTED_BLOCK_SIZES:
        raise ConfigurationError(f"block_size={block_size} is not served; choose one of {SUPPORTED_BLOCK_SIZES}")
    layers_by_spec: dict[KVSpec, list[int]] = {}
    for layer, spec in enumerate(specs):
        layers_by_spec.setdefault(spec, []).append(layer)
    room = _page_room({spec: len(layers) for spec, layers in layers_by_spec.items()})
    groups = [
        KVGroup(spec, tuple(layers[start : start + room // spec.bytes_per_token]))
        for spec, layers in sorted(layers_by_spec.items(), key=lambda item: item[0].window or 0)
        for start in range(0, len(layers), room // spec.bytes_per_token)
    ]
    return KVLayout(block_size, tuple(groups))


def _page_room(counts: Mapping[KVSpec, int]) -> int:
    """Bytes of a token in one page, for so many layers of each spec.

    Pages of layers without a window are as full as can be, since these keep every token; among such sizes, the one with
    the fewest groups whose pages take at most a fifth more than they must.
    """

    def num_groups(spec: KVSpec, room: int) -> int:
        return math.ceil(counts[spec] / (room // spec.bytes_per_token))

    def num_bytes(room: int, specs: Sequence[KVSpec]) -> int:
        return room * sum(num_groups(spec, room) for spec in specs)

    specs = list(counts)
    least = max(spec.bytes_per_token for spec in specs)
    rooms = {spec.bytes_per_token * count for spec in specs for count in range(1, counts[spec] + 1)}
    rooms = {room for room in rooms if room >= least}
    unbounded = [spec for spec in specs if spec.window is None]
    fullest = min(num_bytes(room, unbounded) for room in rooms)
    rooms = {room for room in rooms if num_bytes(room, unbounded) == fullest}
    most_bytes = _MOST_BYTES * min(num_bytes(room, specs) for room in rooms)
    rooms = {room for room in rooms if num_bytes(room, specs) <= most_bytes}
    return min(rooms, key=lambda room: (sum(num_groups(spec, room) for spec in specs), num_bytes(room, specs)))
