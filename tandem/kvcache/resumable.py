"""Translates a pool's block events, for models with recurrent or windowed layers, into events of prefixes that can be
resumed.

A bounded layer keeps only what its next query reads: one (*constant*) state, or the tokens of its window. A worker may
hold the K and V of a block in the layers that keep every token, but not what the bounded layers need to continue there
or later; such a block must not be reported to the locality index. The blocks after which a request can continue are
reported too, as blocks of their own name (`resume_name`).
"""

import math
from dataclasses import dataclass, field

from tandem.core.events import BlockEvent, BlockEventSink, BlockRemoved, BlockStored
from tandem.core.hashing import resume_name
from tandem.kvcache.spec import KVLayout

_COUNTED_GROUP = 0  # as of the locality index
_FAR = 1 << 40  # a position that no request reaches


@dataclass(slots=True, eq=False)
class _Block:
    """State of one block.

    Args:
        runs: by bounded group, the number of consecutive blocks held of its chain up to this one; 0 = not this one.
            Not counted beyond what any query reads.
        depth: number of blocks before it; None = not known, since one before it was never reported.
        children: the blocks that follow it directly and of which anything is held.
        num_useful: of `children`, those that are reported.
    """

    block_hash: bytes
    runs: list[int]
    depth: int | None = None
    parent: "_Block | None" = None
    children: "list[_Block]" = field(default_factory=list)
    is_held: bool = False
    is_resumable: bool = False
    is_reported: bool = False
    num_useful: int = 0


class ResumableEvents:
    """Receives a pool's events and emits events of group 0: a block is stored while it is held and a request can
    continue after it or after a later block of its chain. While one can continue after the block itself, its
    `resume_name` is stored too.

    Args:
        layout: group 0 keeps every token; other groups that do are not looked at, since they are evicted later.
        emit: receives the events.
    """

    def __init__(self, layout: KVLayout, emit: BlockEventSink) -> None:
        self._layout = layout
        self._emit = emit
        self._groups = _bounded_groups(layout)
        seen = (layout.groups[group].spec.most_seen(_FAR) for group in self._groups)
        self._most = [max(1, math.ceil(num_tokens / layout.block_size)) for num_tokens in seen]
        self._blocks: dict[bytes, _Block] = {}

    def __call__(self, event: BlockEvent) -> None:
        if event.group != _COUNTED_GROUP and event.group not in self._groups:
            return
        is_stored, block = isinstance(event, BlockStored), self._block(event.block_hash)
        if isinstance(event, BlockStored):
            self._link(block, event.parent_hash)
        if event.group == _COUNTED_GROUP:
            block.is_held = is_stored
            self._settle(block)
        else:
            self._count(block, self._groups.index(event.group), is_stored)
        self._forget(block)

    def __len__(self) -> int:
        """Number of blocks of which anything is remembered."""
        return len(self._blocks)

    def _block(self, block_hash: bytes) -> _Block:
        if block_hash not in self._blocks:
            self._blocks[block_hash] = _Block(block_hash, [0] * len(self._groups))
        return self._blocks[block_hash]

    def _link(self, block: _Block, parent_hash: bytes | None) -> None:
        """Find the place of a block in its chain, if nothing of it was held before."""
        if block.parent is not None:
            return
        if parent_hash is not None:
            block.parent = self._block(parent_hash)
            block.parent.children.append(block)
        placed = [block] if block.depth is None else []
        while placed:
            found = placed.pop()
            before = -1 if found.parent is None else found.parent.depth
            if before is not None:
                found.depth = before + 1
                self._settle(found)
                placed += found.children

    def _count(self, block: _Block, place: int, is_stored: bool) -> None:
        """Update the runs of a block that was stored or removed, and of those after it."""
        before = 0 if block.parent is None else block.parent.runs[place]
        most, changed = self._most[place], [(block, before + 1 if is_stored else 0)]
        while changed:
            found, run = changed.pop()
            run = min(run, most)
            if run != found.runs[place]:
                found.runs[place] = run
                if found.is_resumable or is_stored:
                    self._settle(found)
                changed += [(child, run + 1) for child in found.children if child.runs[place]]

    def _can_continue(self, block: _Block) -> bool:
        """Whether each bounded group holds what a query reads that follows the block."""
        if block.depth is None:
            return block.runs == self._most
        end = block.depth + 1
        firsts = (self._layout.first_needed(group, end * self._layout.block_size) for group in self._groups)
        return all(run >= end - first for run, first in zip(block.runs, firsts, strict=True))

    def _settle(self, block: _Block) -> None:
        """Emit what changed about a block and those before it."""
        is_resumable = block.is_held and self._can_continue(block)
        if is_resumable != block.is_resumable:
            block.is_resumable = is_resumable
            self._tell(is_resumable, resume_name(block.block_hash), None)
        found: _Block | None = block
        while found is not None:
            is_useful = found.is_held and (found.is_resumable or found.num_useful > 0)
            if is_useful == found.is_reported:
                return
            found.is_reported, parent = is_useful, found.parent
            self._tell(is_useful, found.block_hash, None if parent is None else parent.block_hash)
            if parent is not None:
                parent.num_useful += 1 if is_useful else -1
            found = parent

    def _tell(self, is_stored: bool, name: bytes, parent_name: bytes | None) -> None:
        if is_stored:
            self._emit(BlockStored(name, parent_name, _COUNTED_GROUP))
        else:
            self._emit(BlockRemoved(name, _COUNTED_GROUP))

    def _forget(self, block: _Block) -> None:
        """Drop a block of which nothing is held, unless some are that follow it."""
        found: _Block | None = block
        while found is not None and not (found.is_held or any(found.runs)):
            parent, found.parent = found.parent, None
            if parent is not None:
                parent.children.remove(found)
            if not found.children:
                del self._blocks[found.block_hash]
            found = parent


def resumable_events(layout: KVLayout, emit: BlockEventSink | None) -> BlockEventSink | None:
    """`emit` behind a `ResumableEvents`, or `emit` itself if the layout has no bounded groups beside growing ones."""
    return emit if emit is None or not names_states(layout) else ResumableEvents(layout, emit)


def names_states(layout: KVLayout) -> bool:
    """Whether the model has both bounded layers and others, so that blocks after which a request can continue are
    reported by name.
    """
    return not layout.groups[_COUNTED_GROUP].spec.is_bounded and bool(_bounded_groups(layout))


def _bounded_groups(layout: KVLayout) -> list[int]:
    return [group for group, found in enumerate(layout.groups) if found.spec.is_bounded]
