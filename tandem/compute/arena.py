"""The KV tensors: one allocation for the life of the process, cut into pages.

Page `i` is `page_bytes` contiguous bytes at `base + i * page_bytes`, so transports address blocks by index alone.
Block 0 is the null block: padding and freed window entries point at it, nobody's tokens live in it.
"""

from dataclasses import dataclass

import torch

from tandem.compute.huge_pages import advise_huge_pages
from tandem.kvcache.spec import KVLayout

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class LayerKV:
    """One layer's view of the arena; strided over pages, so never contiguous across blocks."""

    keys: torch.Tensor  # [num_blocks, num_kv_heads, block_size, head_dim]
    values: torch.Tensor  # [num_blocks, num_kv_heads, block_size, head_dim]


class Arena:
    """Owns the memory of `num_blocks` pages, the null block included.

    Args:
        layout: how a page is divided.
        num_blocks: pages to allocate, including block 0.
        device: where they live.
    """

    def __init__(self, layout: KVLayout, num_blocks: int, device: torch.device) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.pages = torch.empty(num_blocks, layout.page_bytes, dtype=torch.uint8, device=device)
        advise_huge_pages(self.pages)
        self.pages.zero_()  # NOTE: all memory is taken now, so that none can be missing while requests run
        self.layers = tuple(self._layer_view(layer) for layer in range(layout.num_layers))

    def _layer_view(self, layer: int) -> LayerKV:
        group_index, index = self.layout.group_of_layer(layer)
        group = self.layout.groups[group_index]
        start = index * group.spec.block_bytes(self.layout.block_size)
        views = {}
        for plane in group.spec.planes:
            end = start + plane.block_bytes(self.layout.block_size)
            numbers = self.pages[:, start:end].view(TORCH_DTYPES[plane.dtype])
            views[plane.name] = numbers.unflatten(1, plane.block_shape(self.layout.block_size))  # type: ignore[no-untyped-call]
            start = end
        return LayerKV(keys=views["k"], values=views["v"])
