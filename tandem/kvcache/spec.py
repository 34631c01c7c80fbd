"""Layout of the layers' state in pages. Pure arithmetic, no tensors.

Layers with the same `KVSpec` form groups; every group has its own block table per request, and all groups draw blocks
from one pool. A block is a *page* of `page_bytes`, the same for every group: it holds `block_size` tokens of K and V
for the `num_layers` layers of the group it currently serves. So a page crosses the wire as one descriptor.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.architecture.state import KVSpec
from tandem.core.errors import ConfigurationError

SUPPORTED_BLOCK_SIZES = (8, 16, 32, 64, 128)


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

    Full groups of `n` layers each, where `n` is the smallest count any spec has: a model of 22 local and 4 global
    layers becomes six groups (five of 4 and one of 2 local layers, one of 4 global), and pages stay nearly full.

    Raises:
        ConfigurationError: for a block size that no backend serves.
    """
    if block_size not in SUPPORTED_BLOCK_SIZES:
        raise ConfigurationError(f"block_size={block_size} is not served; choose one of {SUPPORTED_BLOCK_SIZES}")
    layers_by_spec: dict[KVSpec, list[int]] = {}
    for layer, spec in enumerate(specs):
        layers_by_spec.setdefault(spec, []).append(layer)
    size = min(len(layers) for layers in layers_by_spec.values())
    groups = [
        KVGroup(spec, tuple(layers[start : start + size]))
        for spec, layers in sorted(layers_by_spec.items(), key=lambda item: item[0].window or 0)
        for start in range(0, len(layers), size)
    ]
    return KVLayout(block_size, tuple(groups))
