"""Events of prefixes that can be resumed, beside what a look at all blocks says."""

import hashlib
import random
from collections.abc import Sequence

import pytest

from tandem.architecture.entry_states import RowsSpec
from tandem.core.events import BlockEvent, BlockRemoved, BlockStored
from tandem.core.hashing import extend_hashes, resume_name
from tandem.kvcache.checkpoints import checkpoint_blocks
from tandem.kvcache.manager import KVCacheManager
from tandem.kvcache.prefix import longest_prefix
from tandem.kvcache.resumable import ResumableEvents, names_states, resumable_events
from tandem.kvcache.spec import KVLayout
from tandem.locality.embedded import EmbeddedIndex
from tests.helpers.layouts import BLOCK_SIZE, layout_of
from tests.helpers.toy_states import ATTENTION, LAYOUTS, SLIDING, ToyRecurrentSpec, toy_layout


def named(letter: str) -> bytes:
    return hashlib.sha256(letter.encode()).digest()


PARENTS = {"a": None, "b": "a", "c": "b", "d": "c", "e": "d", "f": "e", "x": "b", "y": "x", "v": "d", "z": None}
TREE = {named(child): None if parent is None else named(parent) for child, parent in PARENTS.items()}
STATE = ToyRecurrentSpec(4, BLOCK_SIZE)
MIXTURES = {
    "two states": toy_layout(ATTENTION, STATE, STATE),
    "a window": layout_of(None, 6),
    "two windows": layout_of(None, 6, 14),
    "window and state": toy_layout(ATTENTION, STATE, SLIDING),
    "two growing, rows": toy_layout(ATTENTION, RowsSpec(6, "float32", 10), ATTENTION),
    "two growing": layout_of(None, None),
}
NAMED = {name: layout for name, layout in (LAYOUTS | MIXTURES).items() if names_states(layout)}


def chain_to(name: bytes) -> list[bytes]:
    parent = TREE[name]
    return [*([] if parent is None else chain_to(parent)), name]


def expected(layout: KVLayout, held: set[tuple[bytes, int]]) -> set[bytes]:
    """Blocks on an unbroken way from themselves to one after which a request can continue, and names of those."""
    bounded = [group for group, found in enumerate(layout.groups) if found.spec.is_bounded]
    growing = set(range(len(layout.groups))) - set(bounded)

    def can_continue(name: bytes) -> bool:
        chain, needed = chain_to(name), {(name, group) for group in growing}
        for group in bounded:
            first = layout.first_needed(group, len(chain) * layout.block_size)
            needed |= {(each, group) for each in chain[first:]}
        return needed <= held

    def is_useful(name: bytes) -> bool:
        if not all((name, group) in held for group in growing):
            return False
        return can_continue(name) or any(is_useful(child) for child, parent in TREE.items() if parent == name)

    names = {resume_name(name) for name in TREE if can_continue(name)} if bounded else set()
    return {name for name in TREE if is_useful(name)} | names


class Told:
    """Receives events, each of which must be a change."""

    def __init__(self) -> None:
        self.names = set[bytes]()
        self.events = list[BlockEvent]()

    def __call__(self, event: BlockEvent) -> None:
        assert event.group == 0
        self.events.append(event)
        assert (event.block_hash in self.names) == isinstance(event, BlockRemoved), "told twice"
        (self.names.discard if isinstance(event, BlockRemoved) else self.names.add)(event.block_hash)


@pytest.mark.parametrize("layout", MIXTURES.values(), ids=MIXTURES)
def test_blocks_are_told_as_long_as_a_request_can_continue_at_or_after_them(layout: KVLayout) -> None:
    """In any order of stores and removals; each change is told once, and nothing is remembered at the end."""
    rng = random.Random(5)
    told, held, num_groups = Told(), set[tuple[bytes, int]](), len(layout.groups)
    passed_on = ResumableEvents(layout, told)
    for _ in range(4000):
        name, group = rng.choice(sorted(TREE)), rng.randrange(num_groups)
        if (name, group) not in held:
            held.add((name, group))
            passed_on(BlockStored(name, TREE[name], group))
        elif rng.random() < 0.7:  # NOTE: windows are whole now and then
            held.remove((name, group))
            passed_on(BlockRemoved(name, group))
        assert told.names == expected(layout, held)
    assert len(told.events) > 500
    for name, group in sorted(held):
        passed_on(BlockRemoved(name, group))
    assert not told.names
    assert len(passed_on) == 0


def chain_of(letters: Sequence[int]) -> list[bytes]:
    hashes: list[bytes] = []
    extend_hashes(b"root", hashes, letters, BLOCK_SIZE)
    return hashes


def serve(kv: KVCacheManager, letters: Sequence[int], num_answered: int = 4, chunk: int = 8) -> bool:
    """One request from its prompt to its end, if the pool has room for it."""
    num_tokens = len(letters) + num_answered
    hashes = chain_of([*letters, *range(num_answered)])
    match = kv.match(hashes, len(letters))
    if not kv.can_admit(match, num_tokens):
        return False
    checkpoints = checkpoint_blocks(len(letters), (), BLOCK_SIZE)
    kv.admit("r", match, hashes, num_tokens, checkpoints=checkpoints)
    for start in range(match.num_blocks * BLOCK_SIZE, num_tokens, chunk):
        end = min(start + chunk, num_tokens)
        assert kv.grow("r", start, end)
        kv.commit("r", hashes, end)
    kv.release("r")
    return True


@pytest.mark.parametrize("layout", NAMED.values(), ids=NAMED)
def test_what_is_told_is_what_every_layer_can_serve(layout: KVLayout) -> None:
    """Chats that part anywhere, in a pool that holds few of them. The names told of each chain are the prefixes that a
    request would find here, and no others.
    """
    told, rng = Told(), random.Random(9)
    sink = resumable_events(layout, told)
    assert sink is not told
    kv = KVCacheManager(layout, 64, max_chunk_tokens=8, emit=sink)
    chats: list[list[int]] = [[]]
    num_named, num_served = 0, 0
    for _ in range(150):
        known = rng.choice(chats[-6:])
        letters = known[: rng.randrange(len(known) + 1)] + [rng.randrange(9) for _ in range(rng.randint(1, 20))]
        letters = letters[-60:] if len(letters) > 60 else letters
        num_served += serve(kv, letters)
        chats.append(letters)
        for chat in chats[-8:]:
            hashes = chain_of(chat)
            ends = range(1, len(hashes) + 1)
            found = [end for end in ends if longest_prefix(kv._cache, layout, hashes[:end], end).num_blocks == end]
            named = [end for end in ends if resume_name(hashes[end - 1]) in told.names]
            # NOTE: a name may outlive the beginning of its chain, which a look-up asks for before
            lead = next((i for i, name in enumerate(hashes) if name not in told.names), len(hashes))
            assert [end for end in named if end <= lead] == found
            num_named += len(found)
    assert num_served > 100
    assert num_named > 100


def test_a_window_that_was_evicted_ends_the_prefix_that_an_index_counts() -> None:
    """A prompt that leaves another's in the middle was counted to there by the index, and found nothing there."""
    layout = layout_of(None, 6)
    told = list[BlockEvent]()
    kv = KVCacheManager(layout, 24, max_chunk_tokens=8, emit=resumable_events(layout, told.append))
    first, other = [1] * 60, [1] * 32 + [2] * 12
    assert serve(kv, first)
    assert kv.match(chain_of(other), 44).num_blocks == 0, "the window there is evicted"
    index = EmbeddedIndex()
    index.replace("w", 1, [], 0)
    index.publish("w", 1, told, 1)
    for letters, num_blocks in ((first, 14), (other, 0)):
        hashes = chain_of(letters)
        leading = index.leading_blocks(hashes[: (len(letters) - 1) // BLOCK_SIZE])
        assert index.resumable_blocks(hashes, leading).get("w", 0) == num_blocks
        assert kv.match(hashes, len(letters)).num_blocks == num_blocks


def test_a_single_group_or_none_that_grows_needs_no_translation() -> None:
    sink = list[BlockEvent]().append
    for windows in ((None,), (8,), (8, 14)):
        assert resumable_events(layout_of(*windows), sink) is sink
    assert resumable_events(layout_of(None, 8), None) is None
    assert not names_states(layout_of(None, None))
    named = {name for name, layout in LAYOUTS.items() if names_states(layout)}
    assert named == {"latent+sliding", "entries+parts+rows", "full+recurrent", "latent+sliding+2 recurrent"}
