"""Random requests, pins, time, pressure and host copies against plain facts: what was promised is found, bit by bit."""

from dataclasses import dataclass, field
from typing import ClassVar

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tandem.core.events import BlockEvent, BlockRemoved
from tandem.core.hashing import extend_hashes
from tandem.kvcache.manager import KVCacheManager
from tandem.kvcache.prefix import longest_prefix
from tandem.kvcache.spec import KVLayout
from tandem.kvcache.tiers import BlockKey, HostMove, HostRead
from tests.helpers.layouts import BLOCK_SIZE, layout_of
from tests.helpers.toy_states import ToyLatentSpec, ToyRecurrentSpec, toy_layout

NUM_BLOCKS = 24
NUM_SLOTS = 10
MAX_CHUNK = 10
SHARE = 0.25

prompts = st.builds(
    lambda family, shared, own: [family] * shared + own,
    st.integers(0, 2),
    st.integers(0, 30),
    st.lists(st.integers(0, 1), min_size=1, max_size=8),
)
pins = st.lists(st.tuples(st.integers(0, 40), st.integers(5, 60)), max_size=3)


@dataclass
class Promise:
    token_ids: list[int]
    hashes: list[bytes]
    until_s: float


@dataclass
class Owner:
    token_ids: list[int]
    hashes: list[bytes]
    num_computed: int = 0
    pins: list[tuple[int, int]] = field(default_factory=list)


def chain(token_ids: list[int]) -> list[bytes]:
    hashes: list[bytes] = []
    extend_hashes(b"root", hashes, token_ids, BLOCK_SIZE)
    return hashes


class PinnedPrefixes(RuleBasedStateMachine):
    layout: ClassVar[KVLayout]
    num_slots: ClassVar[int] = NUM_SLOTS

    def __init__(self) -> None:
        super().__init__()
        self.index: set[BlockKey] = set()
        self.manager = KVCacheManager(
            self.layout, NUM_BLOCKS, max_chunk_tokens=MAX_CHUNK, pin_share=SHARE, emit=self.hear
        )
        self.moves: list[HostMove] = []
        if self.num_slots:
            self.manager.pinned.blocks.attach_host(self.num_slots, self.moves.append)
        self.owners: dict[str, Owner] = {}
        self.pool: dict[int, BlockKey] = {}
        self.host: dict[int, BlockKey] = {}
        self.promises: list[Promise] = []
        self.now_s = 0.0
        self.num_named = 0
        self.num_broken = 0
        self.any_failed = False

    def hear(self, event: BlockEvent) -> None:
        """A locality index that knows only events."""
        key = (event.group, event.block_hash)
        assert isinstance(event, BlockRemoved) == (key in self.index), "an event that changes nothing"
        self.index ^= {key}

    def new_name(self) -> str:
        self.num_named += 1
        return f"owner{self.num_named}"

    def found(self, hashes: list[bytes]) -> int:
        return longest_prefix(self.manager.pinned, self.layout, hashes, len(hashes)).num_blocks

    def admit(self, token_ids: list[int], hashes: list[bytes], num_expected: int = 0) -> str | None:
        """A request is admitted, or must wait: then somebody else has blocks, or some are on their way."""
        match = self.match = self.manager.match(hashes, len(token_ids), num_expected)
        is_alone = not self.owners
        if not (self.manager.can_admit(match, len(token_ids)) or self.manager.make_room(match, len(token_ids))):
            assert not is_alone or self.moves, "a request that has the pool to itself was not admitted"
            self.note_broken(is_alone)  # NOTE: what has no slots is broken at once, and what moves is waited for
            return None
        self.note_broken(is_alone)
        for group, block_ids in enumerate(match.block_ids):
            for index, block_id in enumerate(block_ids):
                assert not block_id or self.pool[block_id] == (group, hashes[index]), "wrong content was matched"
        name = self.new_name()
        self.manager.admit(name, match, hashes, len(token_ids))
        self.owners[name] = Owner(token_ids, hashes, match.num_blocks * BLOCK_SIZE)
        return name

    def note_broken(self, is_alone: bool) -> None:
        """Promises yield only to a request that is alone."""
        num_broken = self.manager.pinned.blocks.usage.num_broken
        if num_broken > self.num_broken:
            assert is_alone, "a promise was broken though others would have given blocks back"
            self.promises.clear()
            self.num_broken = num_broken

    @rule(token_ids=prompts, wanted=pins, stays=st.booleans())
    def serve(self, token_ids: list[int], wanted: list[tuple[int, int]], stays: bool) -> None:
        hashes = chain(token_ids)
        name = self.admit(token_ids, hashes)
        if name is None:
            return
        owner = self.owners[name]
        owner.pins = wanted
        self.grant(owner, -1)
        while owner.num_computed < len(token_ids):
            if not self.compute(name, owner, min(owner.num_computed + MAX_CHUNK, len(token_ids))):
                stays = False
                break
        if not stays:
            self.release(sorted(self.owners).index(name))

    def compute(self, name: str, owner: Owner, end: int) -> bool:
        is_alone = len(self.owners) == 1
        while not self.manager.grow(name, owner.num_computed, end):
            if not self.manager.make_room_to_grow(name, end):
                has_all = is_alone and not self.moves and self.manager.fits(end)
                assert not has_all, "a request that has the pool to itself could not grow"
                return False
            self.note_broken(is_alone)
        before, owner.num_computed = owner.num_computed, end
        self.write(name, owner.hashes, before, end)
        self.manager.commit(name, owner.hashes, end)
        self.grant(owner, before)
        return True

    def write(self, name: str, hashes: list[bytes], start: int, end: int) -> None:
        """Writes as the model does, which must hit only blocks that nobody was promised and nothing is copied from."""
        for group, blocks in enumerate(self.manager._tables[name].groups):
            for index in range(start // BLOCK_SIZE, -(-end // BLOCK_SIZE)):
                block_hash = hashes[index] if index < len(hashes) else name.encode()
                if blocks[index]:
                    pages = self.manager._pool.pages_of(blocks[index])
                    self.pool.update(dict.fromkeys(pages, (group, block_hash)))

    def grant(self, owner: Owner, before: int) -> None:
        """As the scheduler does, when the cursor passes a pin."""
        for num_tokens, ttl_s in owner.pins:
            num_blocks = min(num_tokens // BLOCK_SIZE, len(owner.hashes))
            if before < num_blocks * BLOCK_SIZE <= owner.num_computed or (before < 0 and num_blocks == 0):
                room = min(self.manager.pinned.blocks.room, self.manager.num_unpromised)
                found = longest_prefix(self.manager._cache, self.layout, owner.hashes, num_blocks).num_blocks
                granted = self.manager.pinned.pin(owner.hashes[:num_blocks], ttl_s)
                assert granted <= found
                most = found * sum(group.pages_per_block for group in self.layout.groups)
                assert granted == found or most > room, "room was left"
                kept = owner.token_ids[: granted * BLOCK_SIZE]
                self.promises.append(Promise(kept, owner.hashes[:granted], self.now_s + ttl_s))

    @precondition(lambda self: self.owners)
    @rule(index=st.integers(0, 100))
    def release(self, index: int) -> None:
        name = sorted(self.owners)[index % len(self.owners)]
        del self.owners[name]
        self.manager.release(name)

    @precondition(lambda self: self.owners)
    @rule(index=st.integers(0, 100), count=st.integers(1, MAX_CHUNK))
    def decode(self, index: int, count: int) -> None:
        """An answer grows, past what was promised at admission."""
        name = sorted(self.owners)[index % len(self.owners)]
        owner = self.owners[name]
        if not self.compute(name, owner, owner.num_computed + count):
            self.release(index)

    @rule(seconds=st.integers(1, 20))
    def pass_time(self, seconds: int) -> None:
        self.now_s += seconds
        self.manager.pinned.tell_time(self.now_s)
        self.promises = [promise for promise in self.promises if promise.until_s > self.now_s]

    @precondition(lambda self: self.moves)
    @rule(fails=st.integers(0, 15))
    def finish_move(self, fails: int) -> None:
        """The bytes are taken as late as can be: the blocks must still be what they were."""
        move = self.moves.pop(0)
        is_copied = fails > 0
        if is_copied:
            self.host.update((slot, self.pool[block_id]) for block_id, slot in move.pairs)
        self.any_failed |= not is_copied
        self.manager.pinned.blocks.end_move(move.move_id, is_copied=is_copied)

    @rule()
    def press(self) -> None:
        """Evicts all that may be evicted."""
        name = self.manager.borrow(self.new_name(), NUM_BLOCKS) and f"owner{self.num_named}"
        if name:
            self.manager.drop(name)

    @precondition(lambda self: self.promises)
    @rule(index=st.integers(0, 100), expires=st.integers(0, 3))
    def restore(self, index: int, expires: int) -> None:
        """A request whose prefix is partly in the host tier only; meanwhile time may pass."""
        token_ids = [*self.promises[index % len(self.promises)].token_ids, 9]
        hashes = chain(token_ids)
        num_expected = self.manager.pinned.num_restorable(hashes[: (len(token_ids) - 1) // BLOCK_SIZE]) * BLOCK_SIZE
        name = self.admit(token_ids, hashes, num_expected) if num_expected else None
        if name is None:
            return
        if self.owners[name].num_computed < num_expected:
            groups = self.manager.reserve(name, num_expected, num_expected, self.match.more)
            reads = self.manager.pinned.begin_restore(hashes, groups)
            assert len(reads) == sum(len(found.block_ids) for found in groups), "what is restorable was not there"
            if expires == 0:
                self.pass_time(20)
            self.load(hashes, reads)
            self.manager.commit(name, hashes, num_expected)
            self.manager.pinned.blocks.end_reads(reads, is_restored=True)
        self.release(sorted(self.owners).index(name))

    def load(self, hashes: list[bytes], reads: tuple[HostRead, ...]) -> None:
        for read in reads:
            memory, places = (self.host, read.slots) if read.slots else (self.pool, read.source_pages)
            for page, place in zip(read.pages, places, strict=True):
                assert memory[place] == (read.group, hashes[read.index]), "other bytes were restored"
                self.pool[page] = memory[place]

    @invariant()
    def promises_hold(self) -> None:
        for promise in self.promises:
            assert self.found(promise.hashes) == len(promise.hashes), "a promised prefix is not found"

    @invariant()
    def accounts_agree(self) -> None:
        self.manager.check()
        promised, usage = self.manager.pinned.blocks, self.manager.usage
        states = (usage.free, usage.cached, usage.used, usage.leased, usage.transferring, usage.pinned)
        assert sum(states) == usage.total == NUM_BLOCKS
        assert min(states) >= 0
        if not self.moves and not self.any_failed:
            largest = max(group.pages_per_block for group in self.layout.groups)
            assert promised._num_pooled_pages < NUM_BLOCKS * SHARE + largest, "more than the share is pinned"
        if not self.promises and not self.num_broken and not self.any_failed:
            assert promised.usage.num_pinned == 0, "a block is pinned without a promise"

    @invariant()
    def index_knows_both_tiers(self) -> None:
        pooled = {(group, block_hash) for block_hash, group in self.manager._cache._keys.values()}  # type: ignore[attr-defined]
        hosted = {key for key, promise in self.manager.pinned.blocks._promises.items() if promise.slots}
        assert self.index == pooled | hosted
        for key in hosted:
            for slot in self.manager.pinned.blocks.slots_of(key):
                assert self.host[slot] == key, "a slot has other bytes"

    def teardown(self) -> None:
        for _ in list(self.owners):
            self.release(0)
        while self.moves:
            self.finish_move(1)
        self.pass_time(100)
        usage = self.manager.usage
        assert (usage.used, usage.leased, usage.transferring, usage.pinned) == (0, 0, 0, 0)
        assert self.manager.num_unpromised == NUM_BLOCKS
        assert self.manager.pinned.blocks.usage.num_host == 0


class FullAttention(PinnedPrefixes):
    layout = layout_of(None)


class FullAndSliding(PinnedPrefixes):
    layout = layout_of(None, 6)


class OnlySliding(PinnedPrefixes):
    layout = layout_of(5, 9)


class OfManyPages(PinnedPrefixes):
    """States that can be gone on from after every second block."""

    layout = toy_layout(ToyLatentSpec(6), ToyRecurrentSpec(4, 2 * BLOCK_SIZE))


class WithoutHost(PinnedPrefixes):
    layout = layout_of(None, 6)
    num_slots = 0


# Shrinking takes minutes and CI only needs to know; drop `phases` to shrink a failure.
BUDGET = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
    phases=(Phase.explicit, Phase.generate),
)

for _machine in (FullAttention, FullAndSliding, OnlySliding, OfManyPages, WithoutHost):
    _machine.TestCase.settings = BUDGET

TestFullAttention = FullAttention.TestCase
TestFullAndSliding = FullAndSliding.TestCase
TestOnlySliding = OnlySliding.TestCase
TestOfManyPages = OfManyPages.TestCase
TestWithoutHost = WithoutHost.TestCase
