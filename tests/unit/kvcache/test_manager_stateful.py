"""Random admit/grow/commit/release against `BlockOracle`, for every kind of layout, with leases and pins by others."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tandem.core.hashing import extend_hashes
from tandem.kvcache.manager import HoldKind, KVCacheManager
from tandem.kvcache.prefix import CachedRun
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
    fetch: str | None = None
    hashes: list[bytes] = field(default_factory=list)

    def extend(self, count: int) -> None:
        self.token_ids += [7] * count
        extend_hashes(ROOT, self.hashes, self.token_ids, BLOCK_SIZE)


class BlockAccounting(RuleBasedStateMachine):
    """`scale`: how many times as long prompts, chunks and the pool are, so that blocks are many at once."""

    layout: ClassVar[KVLayout]
    scale: ClassVar[int] = 1

    def __init__(self) -> None:
        super().__init__()
        self.num_blocks, self.max_chunk = self.scale * NUM_BLOCKS, self.scale * MAX_CHUNK
        self.oracle = BlockOracle(self.layout, self.num_blocks)
        self.manager = KVCacheManager(
            self.layout, self.num_blocks, max_chunk_tokens=self.max_chunk, emit=self.oracle.events.append
        )
        self.owners: dict[str, Owner] = {}
        self.contents: dict[int, tuple[int, bytes]] = {}
        self.holds: dict[str, HoldKind] = {}
        self.num_opened = 0
        self.any_outgrew = False
        self.any_held = False

    def scaled(self, token_ids: list[int]) -> list[int]:
        return [token_id for token_id in token_ids for _ in range(self.scale)]

    def pick(self, index: int) -> str:
        return sorted(self.owners)[index % len(self.owners)]

    def follow_hold(self, name: str, kind: HoldKind) -> None:
        """Tell the oracle what is held under `name`."""
        block_ids = list(self.manager._holds[name].block_ids)
        self.oracle.receive_all()
        self.oracle.held[name] = [block_ids]
        self.oracle.idle = [b for b in self.oracle.idle if b not in block_ids]
        self.holds[name] = kind
        self.any_held = True

    def new_name(self, kind: str) -> str:
        self.num_opened += 1
        return f"{kind}{self.num_opened}"

    @rule(token_ids=prompts, expects=st.booleans())
    def admit(self, token_ids: list[int], expects: bool) -> None:
        token_ids = self.scaled(token_ids)
        owner = Owner(token_ids, 0, len(token_ids), shares=False)
        owner.extend(0)
        match = self.manager.match(owner.hashes, len(token_ids), len(token_ids) if expects else 0)
        assert match.num_blocks == self.oracle.longest_match(owner.hashes, len(token_ids))
        self.check_matched_content(match.block_ids, owner.hashes)
        fits = self.manager.can_admit(match, len(token_ids))
        assert fits or self.owners or self.holds or not self.manager.fits(len(token_ids)), "one owner alone was refused"
        if not fits:
            return
        name, self.num_opened = f"owner{self.num_opened}", self.num_opened + 1
        table = self.manager.admit(name, match, owner.hashes, len(token_ids))
        owner.num_computed = match.num_blocks * BLOCK_SIZE
        held = self.oracle.referenced()
        owner.shares = any(held[block_id] for blocks in match.block_ids for block_id in blocks)
        self.owners[name] = owner
        self.oracle.hold(name, table.groups)
        if expects:
            self.reserve(name, owner, match.more)

    def reserve(self, name: str, owner: Owner, more: Sequence[CachedRun]) -> None:
        """Its KV comes from elsewhere: all blocks at once, pinned."""
        table, others = self.manager._tables[name], self.oracle.referenced()
        num_matched = owner.num_computed // BLOCK_SIZE
        ranges = self.manager.reserve(name, len(owner.token_ids), len(owner.token_ids) - 1, more)
        self.oracle.hold(name, table.groups)
        owner.fetch = self.new_name("fetch")
        self.check_room(table.groups, len(owner.token_ids) - 1, len(owner.token_ids))
        for group, (found, blocks) in enumerate(zip(ranges, table.groups, strict=True)):
            assert found.first_index >= num_matched
            taken = [(index, b) for index, b in enumerate(blocks[: found.first_index]) if b and index >= num_matched]
            assert all(self.manager._cache.lookup(owner.hashes[index], group) == b for index, b in taken)
            if found.block_ids and found.first_index < (len(owner.token_ids) - 1) // BLOCK_SIZE:
                is_cached = self.manager._cache.lookup(owner.hashes[found.first_index], group) is not None
                assert not is_cached, "what is cached is to be filled"
            assert found.block_ids == tuple(b for b in blocks[found.first_index :] if b), "not what is to be filled"
            assert not any(others[b] for b in found.block_ids), "a block that someone holds is to be filled"
            self.manager.hold(owner.fetch, found.block_ids, HoldKind.TRANSFER)
        self.follow_hold(owner.fetch, HoldKind.TRANSFER)

    @precondition(lambda self: any(owner.fetch for owner in self.owners.values()))
    @rule(index=st.integers(0, 100), num_missing=st.integers(0, 3), is_over=st.booleans())
    def arrive(self, index: int, num_missing: int, is_over: bool) -> None:
        """All KV has come, or some is missing and the owner starts over; its transfer may not be over yet."""
        waiting = sorted(name for name, owner in self.owners.items() if owner.fetch)
        name = waiting[index % len(waiting)]
        owner = self.owners[name]
        fetch, owner.fetch = owner.fetch, None
        end = max(owner.num_computed, len(owner.token_ids) - 1 - num_missing * BLOCK_SIZE)
        self.commit(name, owner, end)
        if num_missing:
            self.release(sorted(self.owners).index(name))
        if is_over and fetch is not None and fetch in self.holds:
            self.drop(sorted(self.holds).index(fetch))

    @precondition(lambda self: self.owners)
    @rule(index=st.integers(0, 100), start=st.integers(0, 4), length=st.integers(1, 9))
    def lease(self, index: int, start: int, length: int) -> None:
        name = self.pick(index)
        table, owner = self.manager._tables[name], self.owners[name]
        start *= self.scale
        lease, end = self.new_name("lease"), min(start + self.scale * length, table.num_blocks)
        ranges = self.manager.lease(name, len(owner.token_ids), start, end, lease)
        for group, found, blocks in zip(self.layout.groups, ranges, table.groups, strict=True):
            needed = group.spec.needed(len(owner.token_ids) - 1) // BLOCK_SIZE
            assert found.block_ids == tuple(b for b in blocks[max(start, needed) : max(start, end)] if b)
        if any(found.block_ids for found in ranges):
            self.follow_hold(lease, HoldKind.LEASED)

    @rule(token_ids=prompts)
    def lease_cached(self, token_ids: list[int]) -> None:
        """A peer asks for what is cached of a chain."""
        hashes: list[bytes] = []
        extend_hashes(ROOT, hashes, self.scaled(token_ids), BLOCK_SIZE)
        name, unpromised = self.new_name("lease"), self.manager.num_unpromised
        num_blocks, ranges = self.manager.hold_cached(name, hashes)
        longest = self.oracle.longest_match(hashes, len(hashes) * BLOCK_SIZE + 1)
        num_pages = longest * sum(group.pages_per_block for group in self.layout.groups)
        assert num_blocks == longest or (num_blocks == 0 and num_pages > unpromised), "refused without need"
        assert unpromised - self.manager.num_unpromised >= 0
        if num_blocks:
            self.check_matched_content(
                tuple((0,) * found.first_index + found.block_ids for found in ranges), hashes[:num_blocks]
            )
            self.follow_hold(name, HoldKind.LEASED)

    @rule(count=st.integers(0, 30))
    def borrow(self, count: int) -> None:
        others, unpromised = self.oracle.referenced(), self.manager.num_unpromised
        name, count = self.new_name("scratch"), self.scale * count
        block_ids = self.manager.borrow(name, count)
        assert len(set(block_ids)) == len(block_ids) == min(count, unpromised)
        assert not any(others[b] for b in block_ids)
        for block_id in block_ids:
            self.contents[block_id] = (-1, b"scratch")
        self.follow_hold(name, HoldKind.TRANSFER)

    @precondition(lambda self: self.holds)
    @rule(index=st.integers(0, 100))
    def drop(self, index: int) -> None:
        name = sorted(self.holds)[index % len(self.holds)]
        del self.holds[name]
        self.manager.drop(name)
        self.manager.drop(name)
        self.oracle.release(name)

    @precondition(lambda self: any(not owner.fetch for owner in self.owners.values()))
    @rule(index=st.integers(0, 100), chunk=st.integers(1, MAX_CHUNK), commits=st.integers(0, 9))
    def advance(self, index: int, chunk: int, commits: int) -> None:
        """A step: grow, and mostly commit. Not committing is what an abort during the step looks like."""
        ready = sorted(name for name, owner in self.owners.items() if not owner.fetch)
        name = ready[index % len(ready)]
        owner = self.owners[name]
        end = min(owner.num_computed + self.scale * chunk, len(owner.token_ids))
        if end == owner.num_computed:
            owner.extend(1)
            end += 1
        if not self.grow(name, owner, end) or commits == 0:
            self.release(sorted(self.owners).index(name))
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
    def release(self, index: int) -> None:
        name = self.pick(index)
        del self.owners[name]
        self.manager.release(name)
        self.oracle.release(name)
        if not self.owners:
            self.any_outgrew = self.any_held = False

    @property
    def sharing_breaks_promises(self) -> bool:
        """A shared block that leaves one owner's window does not come back to the pool, nor does one that is held."""
        return (self.any_held or any(owner.shares for owner in self.owners.values())) and any(
            group.spec.is_bounded for group in self.layout.groups
        )

    def check_matched_content(self, block_ids: Sequence[Sequence[int]], hashes: list[bytes]) -> None:
        for group, blocks in enumerate(block_ids):
            for index, block_id in enumerate(blocks):
                assert block_id == 0 or self.contents[block_id] == (group, hashes[index]), "wrong content was matched"

    def check_room(self, groups: Sequence[Sequence[int]], start: int, end: int) -> None:
        for group, blocks in zip(self.layout.groups, groups, strict=True):
            first = group.spec.needed(start) // BLOCK_SIZE
            assert len(blocks) * BLOCK_SIZE >= end
            assert all(blocks[first:]), "a visible block is missing"
            reach = 1001 - group.spec.needed(1000)  # NOTE: farther than any window here
            limit = -(-(reach + self.max_chunk) // BLOCK_SIZE) + 1 if group.spec.is_bounded else len(blocks)
            assert sum(b != 0 for b in blocks) <= limit, "a group holds more than its window and a chunk"

    @invariant()
    def accounts_agree(self) -> None:
        self.manager.check()
        usage, oracle = self.manager.usage, self.oracle
        pinned = {b for name, kind in self.holds.items() if kind is HoldKind.TRANSFER for b in oracle.held[name][0]}
        held = {b for name in self.holds for b in oracle.held[name][0]}
        assert usage.transferring == len(pinned)
        assert usage.leased == len(held - pinned)
        assert usage.used + usage.leased + usage.transferring == len(oracle.referenced())
        assert usage.cached == len(oracle.idle) == len(set(oracle.idle))
        states = (usage.free, usage.cached, usage.used, usage.leased, usage.transferring)
        assert sum(states) == usage.total == self.num_blocks
        assert min(states) >= 0

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
            self.release(0)
        assert self.manager.usage.used == 0
        for _ in list(self.holds):
            self.drop(0)
        usage = self.manager.usage
        assert (usage.used, usage.leased, usage.transferring) == (0, 0, 0)
        assert self.manager.num_unpromised == self.num_blocks


class FullAttention(BlockAccounting):
    layout = layout_of(None)


class FullAndSliding(BlockAccounting):
    layout = layout_of(None, 6)


class OnlySliding(BlockAccounting):
    layout = layout_of(5, 9)


class TwoFullOneSliding(BlockAccounting):
    layout = layout_of(None, None, 4)


class LongFullAttention(BlockAccounting):
    layout = layout_of(None)
    scale = 8


class LongFullAndSliding(BlockAccounting):
    layout = layout_of(None, 6)
    scale = 8


# Shrinking takes minutes and CI only needs to know; drop `phases` to shrink a failure.
BUDGET = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
    phases=(Phase.explicit, Phase.generate),
)

for _machine in (
    *(FullAttention, FullAndSliding, OnlySliding, TwoFullOneSliding),
    *(LongFullAttention, LongFullAndSliding),
):
    _machine.TestCase.settings = BUDGET

TestFullAttention = FullAttention.TestCase
TestFullAndSliding = FullAndSliding.TestCase
TestOnlySliding = OnlySliding.TestCase
TestTwoFullOneSliding = TwoFullOneSliding.TestCase
TestLongFullAttention = LongFullAttention.TestCase
TestLongFullAndSliding = LongFullAndSliding.TestCase
