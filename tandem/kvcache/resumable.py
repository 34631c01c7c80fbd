"""Translates a pool's block events, for models of several KV groups, into events of prefixes that can be resumed.

A block counts as held where all *growing* groups hold it, those that keep every token. A bounded group keeps only what
its next query reads: one (*constant*) state, or the tokens of its window. A worker may hold a block, but not what the
bounded groups need to continue there or later; such a block must not be reported to the locality index. The blocks
after which a request can continue are reported too, as blocks of their own name (`resume_name`).
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
        copies: by kind of group, the number of groups that hold it: all growing ones are one kind, the bounded ones
            with the same spec another.
        runs: by bounded kind, the number of consecutive blocks of its chain up to this one that all groups of the kind
            hold; 0 = not this one. Not counted beyond what any query reads.
        depth: number of blocks before it; None = not known, since one before it was never reported.
        children: the blocks that follow it directly and of which anything is held.
        is_held: whether all growing groups hold it.
        num_useful: of `children`, those that are reported.
    """

    block_hash: bytes
    copies: list[int]
    runs: list[int]
    depth: int | None = None
    parent: "_Block | None" = None
    children: "dict[_Block, None]" = field(default_factory=dict)  # NOTE: thousands may follow a common beginning
    is_held: bool = False
    is_resumable: bool = False
    is_reported: bool = False
    num_useful: int = 0


class ResumableEvents:
    """Receives a pool's events and emits events of group 0: a block is stored while it is held and a request can
    continue after it or after a later block of its chain. While one can continue after the block itself, its
    `resume_name` is stored too, if the layout has bounded groups.

    Args:
        layout: group 0 keeps every token.
        emit: receives the events.
    """

    def __init__(self, layout: KVLayout, emit: BlockEventSink) -> None:
        self._layout = layout
        self._emit = emit
        bounded = list(dict.fromkeys(found.spec for found in layout.groups if found.spec.is_bounded))
        self._kinds = [bounded.index(each.spec) + 1 if each.spec.is_bounded else 0 for each in layout.groups]
        self._sizes = [self._kinds.count(kind) for kind in range(len(bounded) + 1)]
        self._bounded = [self._kinds.index(kind + 1) for kind in range(len(bounded))]  # a group of each kind
        seen = (spec.most_seen(_FAR) for spec in bounded)
        self._most = [max(1, math.ceil(num_tokens / layout.block_size)) for num_tokens in seen]
        self._blocks: dict[bytes, _Block] = {}

    def __call__(self, event: BlockEvent) -> None:
        is_stored, block = isinstance(event, BlockStored), self._block(event.block_hash)
        if isinstance(event, BlockStored):
            self._link(block, event.parent_hash)
        kind = self._kinds[event.group]
        block.copies[kind] += 1 if is_stored else -1
        is_whole = block.copies[kind] == self._sizes[kind]
        if kind:
            self._count(block, kind - 1, is_whole)
        elif is_whole != block.is_held:
            block.is_held = is_whole
            self._settle(block)
        if not is_stored:
            self._forget(block)

    def __len__(self) -> int:
        """Number of blocks of which anything is remembered."""
        return len(self._blocks)

    def _block(self, block_hash: bytes) -> _Block:
        if block_hash not in self._blocks:
            self._blocks[block_hash] = _Block(block_hash, [0] * len(self._sizes), [0] * len(self._most))
        return self._blocks[block_hash]

    def _link(self, block: _Block, parent_hash: bytes | None) -> None:
        """Find the place of a block in its chain, if nothing of it was held before."""
        if block.parent is not None:
            return
        if parent_hash is not None:
            block.parent = self._block(parent_hash)
            block.parent.children[block] = None
        placed = [block] if block.depth is None else []
        while placed:
            found = placed.pop()
            before = -1 if found.parent is None else found.parent.depth
            if before is not None:
                found.depth = before + 1
                self._settle(found)
                placed += found.children

    def _count(self, block: _Block, place: int, is_whole: bool) -> None:
        """Update the runs of a block that all groups of a kind hold, or not any more, and of those after it. NOTE: of a
        wide window there are hundreds.
        """
        before = 0 if block.parent is None else block.parent.runs[place]
        most, changed = self._most[place], [(block, before + 1 if is_whole else 0)]
        while changed:
            found, run = changed.pop()
            run = min(run, most)
            while run != found.runs[place]:
                found.runs[place] = run
                if found.is_resumable or is_whole:
                    self._settle(found)
                if run < most:
                    run += 1
                if len(found.children) != 1:
                    changed += [(child, run) for child in found.children if child.runs[place]]
                    break
                (found,) = found.children
                if not found.runs[place]:
                    break

    def _can_continue(self, block: _Block) -> bool:
        """Whether each bounded group holds what a query reads that follows the block."""
        if block.runs == self._most or block.depth is None:
            return block.runs == self._most
        end = block.depth + 1
        firsts = (self._layout.first_needed(group, end * self._layout.block_size) for group in self._bounded)
        return all(run >= end - first for run, first in zip(block.runs, firsts, strict=True))

    def _settle(self, block: _Block) -> None:
        """Emit what changed about a block and those before it."""
        is_resumable = block.is_held and self._can_continue(block)
        if is_resumable != block.is_resumable:
            block.is_resumable = is_resumable
            if self._bounded:
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
        while found is not None and not any(found.copies):
            parent, found.parent = found.parent, None
            if parent is not None:
                del parent.children[found]
            if not found.children:
                del self._blocks[found.block_hash]
            found = parent


def resumable_events(layout: KVLayout, emit: BlockEventSink | None) -> BlockEventSink | None:
    """`emit` behind a `ResumableEvents`, or `emit` itself if the layout has a single group, or no growing one."""
    is_plain = len(layout.groups) == 1 or layout.groups[_COUNTED_GROUP].spec.is_bounded
    return emit if emit is None or is_plain else ResumableEvents(layout, emit)


def names_states(layout: KVLayout) -> bool:
    """Whether the model has both bounded layers and others, so that blocks after which a request can continue are
    reported by name.
    """
    return layout.is_bounded and not layout.groups[_COUNTED_GROUP].spec.is_bounded
