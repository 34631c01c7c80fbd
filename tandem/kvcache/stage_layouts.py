"""Layouts of pipeline stages, each of which keeps the state of some layers. Pure arithmetic.

All stages have the KV groups of a worker without stages, one page size, and the same number of pages per block. So one
block table serves all of them, though a group may have no layers in a stage.
"""

from collections.abc import Sequence

from tandem.kvcache.placement import pieces_of, placement_of
from tandem.kvcache.spec import KVGroup, KVLayout


def stage_layouts(layout: KVLayout, spans: Sequence[range]) -> tuple[KVLayout, ...]:
    """Layout of each stage. `spans`: layers of each; a stage's layout counts them from its first.

    Pages are as large as the stage with most layers of a group that grows with the request needs; where no group does,
    as the one with most layers of any.
    """
    most = [max(_count(group, span) for span in spans) for group in layout.groups]
    page_bytes = _page_bytes(layout, most)
    sizes = [
        placement_of(group.spec, num_layers, layout.block_size, page_bytes).num_pages
        for group, num_layers in zip(layout.groups, most, strict=True)
    ]
    return tuple(
        KVLayout(
            layout.block_size,
            tuple(
                KVGroup(group.spec, tuple(layer - span.start for layer in group.layers if layer in span), num_pages)
                for group, num_pages in zip(layout.groups, sizes, strict=True)
            ),
            page_bytes,
        )
        for span in spans
    )


def _count(group: KVGroup, span: range) -> int:
    return sum(layer in span for layer in group.layers)


def _page_bytes(layout: KVLayout, most: Sequence[int]) -> int:
    """Bytes of a page. `most`: the largest number of layers of each group in any stage."""
    sizes = [
        group.spec.block_bytes(layout.block_size) * count for group, count in zip(layout.groups, most, strict=True)
    ]
    by_token = [size for group, size in zip(layout.groups, sizes, strict=True) if not group.spec.is_constant]
    least = max(each.num_bytes for group in layout.groups for each in pieces_of(group.spec, layout.block_size))
    return max(least, *(by_token or sizes))
