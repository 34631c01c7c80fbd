"""Random references to few and many blocks at once, blocks of several pages and limited states, against plain lists."""

from array import array
from collections import Counter
from random import Random

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tandem.kvcache.block_pool import BlockPool
from tandem.kvcache.prefix import HashPrefixCache

NUM_PAGES, MOST_LIMITED, STATE_PAGES = 400, 60, 3
KEYS, STATES = 0, 1  # KV groups; states are limited

randoms = st.randoms(use_true_random=False)
counts = st.sampled_from((1, 2, 9, 47, 48, 49, 130, 250))


class References(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.cache = HashPrefixCache(2, NUM_PAGES)
        self.pool = BlockPool(NUM_PAGES, self.cache, frozenset({STATES}), MOST_LIMITED)
        self.references = Counter[int]()
        self.pages: dict[int, int] = {}  # of each block that is not free
        self.idle: list[int] = []  # in order of eviction
        self.limited: list[int] = []  # of those, the states, in order of use
        self.findable: set[int] = set()
        self.pinned: set[int] = set()
        self.num_inserted = 0

    def sample(self, rng: Random, blocks: list[int], count: int) -> list[int]:
        return rng.sample(blocks, min(count, len(blocks)))

    def given(self, rng: Random, blocks: list[int]) -> "list[int] | array[int]":
        """As owners hand blocks over: compact or not, with null blocks between."""
        for _ in range(rng.randrange(3)):
            blocks.insert(rng.randint(0, len(blocks)), 0)
        return rng.choice((list, lambda each: array("i", each)))(blocks)

    def evicted(self, block_id: int) -> None:
        self.idle.remove(block_id)
        if block_id in self.limited:
            self.limited.remove(block_id)
        self.findable.remove(block_id)
        del self.pages[block_id]

    @rule(count=counts, is_state=st.booleans())
    def allocate(self, count: int, is_state: bool) -> None:
        size = STATE_PAGES if is_state else 1
        count = min(count, self.pool.num_available // size)
        blocks = self.pool.allocate(count, size)
        evicted = [block_id for block_id in self.idle if not self.cache.holds(block_id)]
        assert evicted == self.idle[: len(evicted)], "not the least recently used blocks were evicted"
        for block_id in evicted:
            self.evicted(block_id)
        assert len(set(blocks)) == count
        assert not self.pages.keys() & set(blocks), "a block was given that is not free"
        self.pages |= dict.fromkeys(blocks, size)
        self.references.update(blocks)

    @precondition(lambda self: +self.references)
    @rule(rng=randoms, count=counts)
    def insert(self, rng: Random, count: int) -> None:
        new = sorted(set(+self.references) - self.findable)
        for block_id in self.sample(rng, new, count):
            self.num_inserted += 1
            group = KEYS if self.pages[block_id] == 1 else STATES
            self.cache.insert(block_id, self.num_inserted.to_bytes(4), None, group)
            self.findable.add(block_id)

    @rule(rng=randoms, count=counts)
    def acquire(self, rng: Random, count: int) -> None:
        blocks = self.sample(rng, [*self.idle, *sorted(self.pinned | set(+self.references))], count)
        blocks = list(dict.fromkeys(blocks))
        num_idle = sum(self.pages[block_id] for block_id in blocks if block_id in self.idle)
        num_available = self.pool.num_available
        given = self.given(rng, blocks)
        assert self.pool.num_idle(given) == num_idle
        self.pool.acquire(given)
        assert self.pool.num_available == num_available - num_idle
        self.references.update(filter(None, blocks))
        self.idle = [block_id for block_id in self.idle if block_id not in blocks]
        self.limited = [block_id for block_id in self.limited if block_id not in blocks]

    @precondition(lambda self: +self.references)
    @rule(rng=randoms, count=counts)
    def release(self, rng: Random, count: int) -> None:
        """A block that has several references may be given as often."""
        blocks = self.sample(rng, list((+self.references).elements()), count)
        self.pool.release(self.given(rng, blocks))
        for block_id in filter(None, blocks):
            self.references[block_id] -= 1
            if self.references[block_id] == 0 and block_id not in self.pinned:
                self.let_go(block_id)

    def let_go(self, block_id: int, *, is_next: bool = False) -> None:
        if block_id not in self.findable:
            del self.pages[block_id]
            return
        self.idle.insert(0 if is_next else len(self.idle), block_id)
        if self.pages[block_id] == STATE_PAGES:
            self.limited.insert(0 if is_next else len(self.limited), block_id)
            while STATE_PAGES * len(self.limited) > MOST_LIMITED:
                self.evicted(self.limited[0])

    @rule(rng=randoms, count=st.integers(1, 5))
    def pin(self, rng: Random, count: int) -> None:
        for block_id in self.sample(rng, sorted(self.findable - self.pinned), count):
            self.pool.pin(block_id)
            self.pinned.add(block_id)
            for blocks in (self.idle, self.limited):
                if block_id in blocks:
                    blocks.remove(block_id)

    @precondition(lambda self: self.pinned)
    @rule(rng=randoms, count=st.integers(1, 5))
    def unpin(self, rng: Random, count: int) -> None:
        for block_id in self.sample(rng, sorted(self.pinned), count):
            self.pool.unpin(block_id)
            self.pinned.remove(block_id)
            if not self.references[block_id]:
                self.let_go(block_id, is_next=True)

    @invariant()
    def agrees(self) -> None:
        self.pool.check(+self.references)
        assert {block_id for block_id in range(1, NUM_PAGES + 1) if self.cache.holds(block_id)} == self.findable
        assert list(self.pool._cached) == self.idle
        assert list(self.pool._limited) == self.limited
        assert self.pool.num_cached == sum(self.pages[block_id] for block_id in self.idle)
        assert self.pool.num_used == sum(self.pages[block_id] for block_id in +self.references)
        assert self.pool.num_free == NUM_PAGES - sum(self.pages.values())


References.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
    phases=(Phase.explicit, Phase.generate),
)
TestReferences = References.TestCase
