"""Random inserts and discards of chains that part anywhere, with stretches of few blocks, against a dictionary."""

from array import array
from itertools import takewhile

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tandem.kvcache.prefix import HashPrefixCache

NUM_BLOCKS, NUM_GROUPS, LONGEST = 60, 2, 11

# Two letters, mostly alike: chains share beginnings of every length.
contents = st.builds(
    lambda length, part: [0] * min(part, length) + [1] * max(0, length - part),
    st.integers(1, LONGEST),
    st.integers(0, LONGEST),
)
groups = st.integers(0, NUM_GROUPS - 1)


def chain(letters: list[int]) -> list[bytes]:
    return [bytes(letters[: index + 1]) for index in range(len(letters))]


class StretchesOfChains(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.cache = HashPrefixCache(NUM_GROUPS, NUM_BLOCKS, stretch_blocks=3)
        self.blocks: dict[tuple[int, bytes], int] = {}
        self.free = list(range(1, NUM_BLOCKS + 1))

    @rule(letters=contents, group=groups, first=st.integers(0, 2))
    def commit(self, letters: list[int], group: int, first: int) -> None:
        """Insert what a request computed: the blocks from some of its first on."""
        hashes = chain(letters)
        if len(self.free) < len(hashes):
            return
        own = array("i", (self.blocks.get((group, block_hash), 0) for block_hash in hashes[:first]))
        own += array("i", self.free[: len(hashes) - first])
        for index in range(first, len(hashes)):
            is_new = self.cache.insert(own[index], hashes[index], None, group)
            assert is_new == ((group, hashes[index]) not in self.blocks)
            if is_new:
                self.blocks[group, hashes[index]] = own[index]
                self.free.remove(own[index])
        self.cache.note_stretches(hashes, own, group, first, len(hashes))

    @precondition(lambda self: self.blocks)
    @rule(index=st.integers(0, NUM_BLOCKS))
    def discard(self, index: int) -> None:
        key = sorted(self.blocks)[index % len(self.blocks)]
        self.free.append(self.blocks[key])
        self.cache.discard(self.blocks.pop(key))

    @rule(letters=contents, group=groups, first=st.integers(0, 7), end=st.integers(0, LONGEST))
    def find(self, letters: list[int], group: int, first: int, end: int) -> None:
        hashes = chain(letters)
        end = min(end, len(hashes))
        found = takewhile(bool, (self.blocks.get((group, block_hash), 0) for block_hash in hashes[first:end]))
        assert self.cache.leading(hashes, group, first, end) == array("i", found)

    @invariant()
    def is_whole(self) -> None:
        self.cache.check()

    def teardown(self) -> None:
        for letters in ([0] * LONGEST, [1] * LONGEST):
            for group in range(NUM_GROUPS):
                self.find(letters, group, 0, LONGEST)


StretchesOfChains.TestCase.settings = settings(
    max_examples=100,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    database=None,
    phases=(Phase.explicit, Phase.generate),
)
TestStretchesOfChains = StretchesOfChains.TestCase
