"""The KV tensors: one allocation for the life of the process, cut into pages.

Page `i` is `page_bytes` contiguous bytes at `base + i * page_bytes`, so transports address blocks by index alone.
Block 0 is the null block: padding and freed window entries point at it, it holds the tokens of no request.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from tandem.architecture.state import ChosenKVSpec, IndexedLatentSpec, KVSpec, LatentSpec, RecurrentSpec, StateSpec
from tandem.compute.huge_pages import advise_huge_pages
from tandem.kvcache.spec import KVLayout

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class LayerKV:
    """One layer's view of the arena; strided over pages, so never contiguous across blocks."""

    keys: torch.Tensor  # [num_blocks, num_kv_heads, block_size, head_dim]
    values: torch.Tensor  # [num_blocks, num_kv_heads, block_size, head_dim]


@dataclass(frozen=True, slots=True)
class LayerChosenKV(LayerKV):
    """One layer's view of the arena where it keeps K and V, and what blocks of them are chosen by."""

    index_keys: torch.Tensor | None  # [num_blocks, block_size, index_dim]; None = there are none
    summaries: Mapping[str, torch.Tensor]  # by plane, [num_blocks, num_kv_heads, block_size, head_dim / span]
    span: int

    def write_index_keys(self, keys: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Store `keys` [num_tokens, index_dim], as `LayerLatents.write` does rows."""
        assert self.index_keys is not None
        _write_rows(self.index_keys, keys, slot_mapping)

    def summary(self, name: str) -> torch.Tensor:
        """[num_blocks, num_kv_heads, block_size / span, head_dim], of a block size that `span` divides."""
        numbers = self.summaries[name]
        num_blocks, num_heads, block_size, part = numbers.shape
        return numbers.view(num_blocks, num_heads, block_size // self.span, part * self.span)


@dataclass(frozen=True, slots=True)
class LayerLatents:
    """One layer's view of the arena where it keeps latents. A row begins with `rank` numbers of the latent."""

    rows: torch.Tensor  # [num_blocks, block_size, rank + rotary_dim]
    rank: int

    def write(self, rows: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Store `rows` [num_tokens, rank + rotary_dim] of the tokens at `slot_mapping`.

        NOTE: tokens without a slot go to the null block, whose content is never read; so no shape depends on data.
        """
        _write_rows(self.rows, rows, slot_mapping)

    @property
    def as_kv(self) -> LayerKV:
        """Keys of one head; they begin with its values, whose other elements are of no use."""
        rows = self.rows.unsqueeze(1)
        return LayerKV(rows, rows)


@dataclass(frozen=True, slots=True)
class LayerIndexedLatents(LayerLatents):
    """One layer's view of the arena where it keeps latents, and keys that they are chosen by."""

    index_keys: torch.Tensor | None  # [num_blocks, block_size, index_dim]; None = another layer has them

    def write_index_keys(self, keys: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Store `keys` [num_tokens, index_dim], as `write` does rows."""
        assert self.index_keys is not None
        _write_rows(self.index_keys, keys, slot_mapping)


@dataclass(frozen=True, slots=True)
class LayerRecurrent:
    """One layer's view of the arena where it keeps a recurrent state; a block holds that after its last token."""

    matrices: torch.Tensor | None  # [num_blocks, num_heads, rows, columns] float32; None = there are none
    columns: torch.Tensor  # [num_blocks, taps - 1, channels], oldest first
    block_size: int


def _write_rows(blocks: torch.Tensor, rows: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    slots, block_size = slot_mapping.clamp_min(0), blocks.shape[1]
    blocks[slots // block_size, slots % block_size] = rows


LayerState = LayerKV | LayerLatents | LayerRecurrent
_VIEWS: Mapping[type[StateSpec], Callable[[Any, Mapping[str, torch.Tensor], int], LayerState]] = {
    KVSpec: lambda spec, planes, block_size: LayerKV(planes["k"], planes["v"]),
    ChosenKVSpec: lambda spec, planes, block_size: LayerChosenKV(
        planes["k"], planes["v"], planes.get("index"), {name: planes[name] for name in spec.summaries}, spec.span
    ),
    LatentSpec: lambda spec, planes, block_size: LayerLatents(planes["latent"], spec.rank),
    IndexedLatentSpec: lambda spec, planes, block_size: LayerIndexedLatents(
        planes["latent"], spec.rank, planes.get("index")
    ),
    RecurrentSpec: lambda spec, planes, block_size: LayerRecurrent(
        planes.get("matrices"), planes["columns"], block_size
    ),
}
"""Kind of state -> the view of a layer's planes, each [num_blocks, ...], in blocks of so many tokens."""


class Arena:
    """Owns the memory of `num_blocks` pages, the null block included.

    Args:
        layout: how a page is divided.
        num_blocks: pages to allocate, including block 0.
        device: where they live.
        pages: [num_blocks, page_bytes] uint8 there, to use that memory; None = memory of its own.
        keeps_pages: what is in `pages` stays.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        device: torch.device,
        pages: torch.Tensor | None = None,
        *,
        keeps_pages: bool = False,
    ) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        if pages is None:
            pages = torch.empty(num_blocks, layout.page_bytes, dtype=torch.uint8, device=device)
        assert pages.shape == (num_blocks, layout.page_bytes)
        self.pages = pages
        advise_huge_pages(self.pages)
        if not keeps_pages:
            self.pages.zero_()  # NOTE: all memory is taken now, so that none can be missing while requests run
        self.layers = tuple(self._layer_view(layer) for layer in range(layout.num_layers))

    def _layer_view(self, layer: int) -> LayerState:
        spec = self.layout.groups[self.layout.group_of_layer(layer)[0]].spec
        return _VIEWS[type(spec)](spec, _planes(self.layout, self.pages, layer), self.layout.block_size)


def constant_planes(layout: KVLayout, pages: torch.Tensor, group: int) -> tuple[torch.Tensor, ...]:
    """Views [num_blocks, ...] of those planes of a group's layers whose size does not depend on tokens."""
    names = [plane.name for plane in layout.groups[group].spec.planes if plane.token_axis is None]
    views = [_planes(layout, pages, layer) for layer in layout.groups[group].layers]
    return tuple(planes[name] for planes in views for name in names)


def _planes(layout: KVLayout, pages: torch.Tensor, layer: int) -> dict[str, torch.Tensor]:
    """Views [num_blocks, ...] of a layer's planes, by name."""
    group_index, index = layout.group_of_layer(layer)
    spec = layout.groups[group_index].spec
    start = index * spec.block_bytes(layout.block_size)
    views = {}
    for plane in spec.planes:
        end = start + plane.block_bytes(layout.block_size)
        numbers = pages[:, start:end].view(TORCH_DTYPES[plane.dtype])
        views[plane.name] = numbers.unflatten(1, plane.block_shape(layout.block_size))  # type: ignore[no-untyped-call]
        start = end
    return views
