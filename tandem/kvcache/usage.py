"""Usage of a KV pool: number of pages by use, and bytes of the layers' state (such as KV) that requests hold."""

from collections.abc import Iterable
from dataclasses import dataclass

from tandem.kvcache.block_table import BlockTable
from tandem.kvcache.prefix import NULL_BLOCK
from tandem.kvcache.spec import KVLayout


@dataclass(frozen=True, slots=True)
class KVCacheUsage:
    """Number of pages by use. Each page counts once, by the first of these that fits; `total` is their sum.

    Args:
        transferring: a transfer may write or read it.
        leased: another worker may read it.
        used: a request owns it.
        pinned: its content is promised to stay cached until a deadline.
        cached: its content can be found by hash until it is evicted.
        free: none of these.
    """

    total: int
    free: int
    cached: int
    used: int
    leased: int = 0
    transferring: int = 0
    pinned: int = 0


@dataclass(frozen=True, slots=True)
class HeldState:
    """State that requests hold now, in bytes. A block shared by several requests counts for each, a partly filled one
    as a whole.

    Args:
        num_bytes: of the layers' state, as far as the next query reads it.
        held_page_bytes: of all pages that they hold, including unused bytes and checkpoints (recurrent states kept for
            later requests).
    """

    num_bytes: int = 0
    held_page_bytes: int = 0

    @classmethod
    def of(cls, layout: KVLayout, tables: Iterable[tuple[BlockTable, int]]) -> "HeldState":
        """State held by the requests of these block tables, each given with the position of its next query."""
        sizes = [len(group.layers) * group.spec.block_bytes(layout.block_size) for group in layout.groups]
        num_bytes = num_pages = 0
        for table, position in tables:
            num_pages += sum(
                num * found.pages_per_block for num, found in zip(table.num_held, layout.groups, strict=True)
            )
            for group, size in enumerate(sizes):
                num_bytes += size * _num_seen(table, group, layout.first_needed(group, position))
        return cls(num_bytes, num_pages * layout.page_bytes)


def _num_seen(table: BlockTable, group: int, first: int) -> int:
    if first == 0:
        return table.num_held[group]
    return sum(block_id != NULL_BLOCK for block_id in table.groups[group][first:])
