"""Events of prefixes that can be resumed, beside what a look at all blocks says."""

import hashlib
import random

from tandem.core.events import BlockEvent, BlockRemoved, BlockStored
from tandem.core.hashing import resume_name
from tandem.kvcache.resumable import ResumableEvents, names_states, resumable_events
from tests.helpers.layouts import layout_of
from tests.helpers.toy_states import LAYOUTS


def named(letter: str) -> bytes:
    return hashlib.sha256(letter.encode()).digest()


PARENTS = {"a": None, "b": "a", "c": "b", "d": "c", "x": "b", "y": "x", "z": None}
TREE = {named(child): None if parent is None else named(parent) for child, parent in PARENTS.items()}
NUM_GROUPS = 3  # one of K and V, two of states


def expected(held: set[tuple[bytes, int]]) -> set[bytes]:
    """Blocks on an unbroken way from themselves to one with all states, and names of those with all states."""

    def has_states(name: bytes) -> bool:
        return all((name, group) in held for group in range(NUM_GROUPS))

    def is_resumable(name: bytes) -> bool:
        if (name, 0) not in held:
            return False
        return has_states(name) or any(is_resumable(child) for child, parent in TREE.items() if parent == name)

    return {name for name in TREE if is_resumable(name)} | {resume_name(name) for name in TREE if has_states(name)}


def test_blocks_are_told_as_long_as_a_state_can_be_reached_through_them() -> None:
    """In any order of stores and removals; each change is told once, and nothing is remembered at the end."""
    rng = random.Random(5)
    told, events = set[bytes](), list[BlockEvent]()

    def receive(event: BlockEvent) -> None:
        assert event.group == 0
        events.append(event)
        assert (event.block_hash in told) == isinstance(event, BlockRemoved), "told twice"
        (told.discard if isinstance(event, BlockRemoved) else told.add)(event.block_hash)

    passed_on, held = ResumableEvents(NUM_GROUPS - 1, receive), set[tuple[bytes, int]]()
    for _ in range(3000):
        name, group = rng.choice(sorted(TREE)), rng.randrange(NUM_GROUPS)
        if (name, group) in held:
            held.remove((name, group))
            passed_on(BlockRemoved(name, group))
        else:
            held.add((name, group))
            passed_on(BlockStored(name, TREE[name], group))
        assert told == expected(held)
    assert len(events) > 500
    for name, group in held:
        passed_on(BlockRemoved(name, group))
    assert not told
    assert len(passed_on) == 0


def test_layers_that_keep_something_of_every_token_need_no_translation() -> None:
    sink = list[BlockEvent]().append
    assert resumable_events(layout_of(None, 8), sink) is sink
    assert resumable_events(layout_of(None), None) is None
    named = {name for name, layout in LAYOUTS.items() if names_states(layout)}
    assert named == {"full+recurrent", "latent+sliding+2 recurrent"}
