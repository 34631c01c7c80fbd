"""Translates a pool's block events, for models with recurrent layers, into events of prefixes that can be resumed.

A recurrent layer keeps one (*constant*) state instead of one a token. A worker may hold the K and V of a block but no
state from which a request could continue there or later; such a block must not be reported to the locality index. The
blocks after which a request can continue are reported too, as blocks of their own name (`resume_name`).
"""

from dataclasses import dataclass

from tandem.core.events import BlockEvent, BlockEventSink, BlockRemoved, BlockStored
from tandem.core.hashing import resume_name
from tandem.kvcache.spec import KVLayout

_COUNTED_GROUP = 0  # as of the locality index


@dataclass(slots=True)
class _Block:
    """State of one block: whether its K and V are held, and how many of its constant states. `num_later`: blocks that
    follow it directly and are resumable or lead to one.
    """

    parent_hash: bytes | None = None
    is_held: bool = False
    num_states: int = 0
    num_later: int = 0


class ResumableEvents:
    """Receives a pool's events and emits events of group 0: a block is stored while it is held together with the
    constant states of itself or of a later block of its chain. While its own states are held, its `resume_name` is
    stored too.

    Args:
        num_state_groups: KV groups that hold constant states; group 0 is none of them.
        emit: receives the events.
    """

    def __init__(self, num_state_groups: int, emit: BlockEventSink) -> None:
        self._num_state_groups = num_state_groups
        self._emit = emit
        self._blocks: dict[bytes, _Block] = {}

    def __call__(self, event: BlockEvent) -> None:
        is_stored = isinstance(event, BlockStored)
        block = self._blocks.setdefault(event.block_hash, _Block())
        was_useful, was_resumable = self._is_useful(block), self._is_resumable(block)
        if event.group == _COUNTED_GROUP:
            block.is_held = is_stored
        else:
            block.num_states += 1 if is_stored else -1
        if isinstance(event, BlockStored):
            block.parent_hash = event.parent_hash
        if self._is_resumable(block) != was_resumable:
            name = resume_name(event.block_hash)
            self._emit((BlockRemoved if was_resumable else _stored)(name, _COUNTED_GROUP))
        self._settle(event.block_hash, block, was_useful)

    def __len__(self) -> int:
        """Number of blocks of which anything is held."""
        return len(self._blocks)

    def _is_resumable(self, block: _Block) -> bool:
        return block.is_held and block.num_states == self._num_state_groups

    def _is_useful(self, block: _Block) -> bool:
        return self._is_resumable(block) or (block.is_held and block.num_later > 0)

    def _settle(self, block_hash: bytes, block: _Block, was_useful: bool) -> None:
        """Emit the change of a block, and update the counts of the blocks before it."""
        while self._is_useful(block) != was_useful:
            parent_hash = block.parent_hash
            if was_useful:
                self._emit(BlockRemoved(block_hash, _COUNTED_GROUP))
            else:
                self._emit(BlockStored(block_hash, parent_hash, _COUNTED_GROUP))
            self._forget_if_empty(block_hash, block)
            if parent_hash is None:
                return
            change = -1 if was_useful else 1
            block_hash, block = parent_hash, self._blocks.setdefault(parent_hash, _Block())
            was_useful = self._is_useful(block)
            block.num_later += change
        self._forget_if_empty(block_hash, block)

    def _forget_if_empty(self, block_hash: bytes, block: _Block) -> None:
        if not (block.is_held or block.num_states or block.num_later):
            del self._blocks[block_hash]


def resumable_events(layout: KVLayout, emit: BlockEventSink | None) -> BlockEventSink | None:
    """`emit` behind a `ResumableEvents`, or `emit` itself if the layout has no recurrent states beside growing ones."""
    return emit if emit is None or not names_states(layout) else ResumableEvents(len(_state_groups(layout)), emit)


def names_states(layout: KVLayout) -> bool:
    """Whether the model has both recurrent and other layers, so that resumable blocks are reported by name."""
    return _COUNTED_GROUP not in _state_groups(layout) and bool(_state_groups(layout))


def _state_groups(layout: KVLayout) -> list[int]:
    return [group for group, found in enumerate(layout.groups) if found.spec.bytes_per_request]


def _stored(name: bytes, group: int) -> BlockStored:
    return BlockStored(name, None, group)
