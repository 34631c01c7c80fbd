"""Random open/grow/commit/close against `BlockOracle`, for every kind of layout."""

from collections import Counter
from dataclasses import dataclass, field
from typing import ClassVar

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tandem.core.hashing import extend_hashes
from tandem.kvcache.manager import KVCacheManager
from tandem.kvcache.spec import KVLayout
from tests.helpers.layouts import BLOCK_SIZE, layout_of
from tests.helpers.oracles import BlockOracle

MAX_CHUNK = 10
NUM_BLOCKS = 24
ROOT = b"root"

# Few families and two letters: chains share beginnings of every length.
prompts = st.builds(
    lambda family, shared, own: [family] * shared + own,
    st.integers(0, 1),
    st.integers(0, 30),
    st.lists(st.integers(0, 1), min_size=1, max_size=8),
)


@dataclass
class Owner:
    """A request, as far as block accounting knows it."""

    token_ids: list[int]
    num_computed: int
    num_promised: int
    shares: bool
    hashes: list[bytes] = field(default_factory=list)

    def extend(self, count: int) -> None:
        self.token_ids += [7] * count
        extend_hashes(ROOT, self.hashes, self.token_ids, BLOCK_SIZE)


class BlockAccounting(RuleBasedStateMachine):
    layout: ClassVar[KVLayout]

    def __init__(self) -> None:
        super().__init__()
        self.oracle = BlockOracle(self.layout, NUM_BLOCKS)
        self.manager = KVCacheManager(
            self.layout, NUM_BLOCKS, max_chunk_tokens=MAX_CHUNK, emit=self.oracle.events.append
        )
        self.owners: dict[str, Owner] = {}
        self.contents: dict[int, tuple[int, bytes]] = {}
        self.num_opened = 0
        self.any_outgrew = False

    def pick(self, index: int) -> str:
        return sorted(self.owners)[index % len(self.owners)]

    @rule(token_ids=prompts)
    def open(self, token_ids: list[int]) -> None:
        owner = Owner(token_ids, 0, len(token_ids), shares=False)
        owner.extend(0)
        match = self.manager.match(owner.hashes, len(token_ids))
        assert match.num_blocks == self.oracle.longest_match(owner.hashes, len(token_ids))
        self.check_matched_content(match.block_ids, owner.hashes)
        fits = self.manager.can_open(match, len(token_ids))
        assert fits or self.owners or not self.manager.fits(len(token_ids)), "one owner alone was refused"
        if not fits:
            return
        name, self.num_opened = f"owner{self.num_opened}", self.num_opened + 1
        table = self.manager.open(name, match, owner.hashes, len(token_ids))
        owner.num_computed = match.num_blocks * BLOCK_SIZE
        held = self.oracle.referenced()
        owner.shares = any(held[block_id] for blocks in match.block_ids for block_id in blocks)
        self.owners[name] = owner
        self.oracle.hold(name, table.groups)

    @precondition(lambda self: self.owners)
    @rule(index=st.integers(0, 100), chunk=st.integers(1, MAX_CHUNK), commits=st.integers(0, 9))
    def advance(self, index: int, chunk: int, commits: int) -> None:
        """A step: grow, and mostly commit. Not committing is what an abort during the step looks like."""
        name = self.pick(index)
        owner = self.owners[name]
        end = min(owner.num_computed + chunk, len(owner.token_ids))
        if end == owner.num_computed:
            owner.extend(1)
            end += 1
        if not self.grow(name, owner, end) or commits == 0:
            self.close(index)
        else:
            self.commit(name, owner, end)

    def grow(self, name: str, owner: Owner, end: int) -> bool:
        table = self.manager._tables[name]
        before = [list(blocks) for blocks in table.groups]
        grown = self.manager.grow(name, owner.num_computed, end)
        added = [b for old, new in zip(before, table.groups, strict=True) for b in new[len(old) :]]
        others = self.oracle.referenced() - Counter(b for blocks in before for b in blocks if b != 0)
        kept = [b for old, new in zip(before, table.groups, strict=True) for b in new[: len(old)] if b != 0]
        assert len({*added, *kept}) == len(added) + len(kept), "a block was given twice"
        assert not any(others[b] for b in added), "a block that someone holds was given away"
        self.any_outgrew |= end > owner.num_promised
        assert grown or self.any_outgrew or self.sharing_breaks_promises, "a promised block was not there"
        assert grown or not added
        self.oracle.hold(name, table.groups)
        if grown:
            self.check_room(table.groups, owner.num_computed, end)
        return grown

    def commit(self, name: str, owner: Owner, end: int) -> None:
        table = self.manager._tables[name]
        self.oracle.offered.clear()
        for group, blocks in enumerate(table.groups):
            for index in range(owner.num_computed // BLOCK_SIZE, end // BLOCK_SIZE):
                if blocks[index]:
                    self.oracle.offered[group, owner.hashes[index]] = blocks[index]
                    self.contents[blocks[index]] = (group, owner.hashes[index])
            if end % BLOCK_SIZE:
                self.contents[blocks[end // BLOCK_SIZE]] = (group, name.encode())
        self.manager.commit(name, owner.hashes, end)
        owner.num_computed = end
        for key in self.oracle.offered:
            assert self.is_stored(key), "a computed block was not offered"
        self.oracle.receive_all()

    def is_stored(self, key: tuple[int, bytes]) -> bool:
        return key in self.oracle.stored or any((e.group, e.block_hash) == key for e in self.oracle.events)

    @precondition(lambda self: self.owners)
    @rule(index=st.integers(0, 100))
    def close(self, index: int) -> None:
        name = self.pick(index)
        del self.owners[name]
        self.manager.close(name)
        self.oracle.close(name)
        if not self.owners:
            self.any_outgrew = False

    @property
    def sharing_breaks_promises(self) -> bool:
        """A shared block that leaves one owner's window does not come back to the pool."""
        return any(owner.shares for owner in self.owners.values()) and any(
            group.spec.window is not None for group in self.layout.groups
        )

    def check_matched_content(self, block_ids: tuple[tuple[int, ...], ...], hashes: list[bytes]) -> None:
        for group, blocks in enumerate(block_ids):
            for index, block_id in enumerate(blocks):
                assert block_id == 0 or self.contents[block_id] == (group, hashes[index]), "wrong content was matched"

    def check_room(self, groups: tuple[list[int], ...], start: int, end: int) -> None:
        for group, blocks in zip(self.layout.groups, groups, strict=True):
            first = group.spec.first_visible(start) // BLOCK_SIZE
            assert len(blocks) * BLOCK_SIZE >= end
            assert all(blocks[first:]), "a visible block is missing"
            limit = len(blocks) if group.spec.window is None else -(-(group.spec.window + MAX_CHUNK) // BLOCK_SIZE) + 1
            assert sum(b != 0 for b in blocks) <= limit, "a group holds more than its window and a chunk"

    @invariant()
    def accounts_agree(self) -> None:
        self.manager.check()
        usage, oracle = self.manager.usage, self.oracle
        assert usage.used == len(oracle.referenced())
        assert usage.cached == len(oracle.idle) == len(set(oracle.idle))
        assert usage.free + usage.cached + usage.used == usage.total == NUM_BLOCKS

    @invariant()
    def in_flight_is_what_owners_will_compute(self) -> None:
        expected = {
            block_hash
            for owner in self.owners.values()
            for block_hash in owner.hashes[owner.num_computed // BLOCK_SIZE : owner.num_promised // BLOCK_SIZE]
        }
        for owner in self.owners.values():
            for block_hash in owner.hashes:
                assert self.manager.is_being_computed(block_hash) == (block_hash in expected)

    def teardown(self) -> None:
        for _ in list(self.owners):
            self.close(0)
        assert self.manager.usage.used == 0


class FullAttention(BlockAccounting):
    layout = layout_of(None)


class FullAndSliding(BlockAccounting):
    layout = layout_of(None, 6)


class OnlySliding(BlockAccounting):
    layout = layout_of(5, 9)


class TwoFullOneSliding(BlockAccounting):
    layout = layout_of(None, None, 4)


# Shrinking takes minutes and CI only needs to know; drop `phases` to shrink a failure.
BUDGET = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
    phases=(Phase.explicit, Phase.generate),
)

for _machine in (FullAttention, FullAndSliding, OnlySliding, TwoFullOneSliding):
    _machine.TestCase.settings = BUDGET

TestFullAttention = FullAttention.TestCase
TestFullAndSliding = FullAndSliding.TestCase
TestOnlySliding = OnlySliding.TestCase
TestTwoFullOneSliding = TwoFullOneSliding.TestCase
