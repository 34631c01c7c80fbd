"""Arena: the memory of the KV cache and of other layer state, one allocation for the life of the process, divided into
pages.

Page `i` is `page_bytes` contiguous bytes at `base + i * page_bytes`, so transports address pages by index alone. A
block is one page, or several in some KV groups, and has the first one's number. Page 0 is the null block: padding and
freed window entries point at it, and it holds no request's tokens.
"""

from dataclasses import dataclass

import torch

from tandem.compute.huge_pages import advise_huge_pages
from tandem.compute.layer_states import TORCH_DTYPES, layer_state
from tandem.kvcache.spec import KVLayout


class Arena:
    """Owns the memory of `num_pages` pages, the null block included, with a view of each layer's state in `layers`.

    Args:
        layout: the layout of a page.
        num_pages: pages to allocate, including the null block.
        device: device of the memory.
        pages: [num_pages, page_bytes] uint8 on that device, memory to use; None = allocate it.
        keeps_pages: the content of `pages` is kept; otherwise all pages are set to zero.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_pages: int,
        device: torch.device,
        pages: torch.Tensor | None = None,
        *,
        keeps_pages: bool = False,
    ) -> None:
        self.layout = layout
        self.num_pages = num_pages
        if pages is None:
            pages = torch.empty(num_pages, layout.page_bytes, dtype=torch.uint8, device=device)
        assert pages.shape == (num_pages, layout.page_bytes)
        self.pages = pages
        advise_huge_pages(self.pages)
        if not keeps_pages:
            self.pages.zero_()  # NOTE: all memory is taken now, so that none can be missing while requests run
        self.layers = tuple(layer_state(layout, self.pages, layer) for layer in range(layout.num_layers))


@dataclass(frozen=True, slots=True)
class NumberSpan:
    """Bytes `start` to `end - 1` of a page that are numbers of one dtype. `page`: index of the page in its block."""

    page: int
    start: int
    end: int
    dtype: torch.dtype


def constant_spans(layout: KVLayout, group: int) -> tuple[NumberSpan, ...]:
    """Byte ranges of a group's blocks with numbers of constant-size states, which are checked to be finite after a
    transfer; empty if the state grows with tokens.
    """
    spec, placement = layout.groups[group].spec, layout.placement(group)
    if not spec.is_constant:
        return ()
    return tuple(
        NumberSpan(place.page, place.start, place.start + count * pieces.num_bytes, TORCH_DTYPES[plane.dtype])
        for kind, (plane, pieces) in enumerate(zip(spec.planes, placement.pieces, strict=True))
        for place, count in placement.runs(kind)
    )
