"""The feed brings an index up to date through lost reports, lost answers, lost memory and restarts."""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tandem.core.errors import LocalityUnavailableError
from tandem.core.events import BlockEvent, BlockRemoved, BlockStored
from tandem.locality.base import LocalityStats, PublishResult
from tandem.locality.embedded import EmbeddedIndex
from tandem.locality.feed import BlockFeed

BLOCKS = [hashlib.sha256(bytes([index])).digest() for index in range(12)]


class FlakyIndex:
    """An embedded index behind a bad connection. Each failure hits one call: its request is lost, or comes only just
    before the next one, or its answer is lost.
    """

    def __init__(self) -> None:
        self.inner = EmbeddedIndex()
        self.failures: list[str] = []
        self.calls: list[str] = []
        self.late: list[Callable[[], PublishResult]] = []

    def publish(self, worker_id: str, epoch: int, events: Sequence[BlockEvent], sequence: int) -> PublishResult:
        events = tuple(events)
        return self._call("publish", lambda: self.inner.publish(worker_id, epoch, events, sequence))

    def replace(self, worker_id: str, epoch: int, hashes: Iterable[bytes], sequence: int) -> PublishResult:
        hashes = tuple(hashes)
        return self._call("replace", lambda: self.inner.replace(worker_id, epoch, hashes, sequence))

    def leading_blocks(self, hashes: Sequence[bytes]) -> Mapping[str, int]:
        return self.inner.leading_blocks(hashes)

    def resumable_blocks(self, hashes: Sequence[bytes], leading: Mapping[str, int]) -> Mapping[str, int]:
        return self.inner.resumable_blocks(hashes, leading)

    def remove_worker(self, worker_id: str) -> None:
        self.inner.remove_worker(worker_id)

    def stats(self) -> LocalityStats:
        return self.inner.stats()

    def holds(self, block_hash: bytes) -> bool:
        return "p0" in self.inner.leading_blocks([block_hash])

    def _call(self, name: str, call: Callable[[], PublishResult]) -> PublishResult:
        self.calls.append(name)
        while self.late:
            self.late.pop()()
        failure = self.failures.pop(0) if self.failures else None
        if failure == "request late":
            self.late.append(call)
        elif failure != "request lost":
            result = call()
        if failure is not None:
            raise LocalityUnavailableError(failure)
        return result


@pytest.fixture
def index() -> FlakyIndex:
    return FlakyIndex()


@pytest.fixture
def feed(index: FlakyIndex) -> BlockFeed:
    return BlockFeed(index, "p0", 1)


def test_the_first_flush_is_a_snapshot_and_later_ones_are_reports(feed: BlockFeed, index: FlakyIndex) -> None:
    feed.emit(BlockStored(BLOCKS[0], None, 0))
    assert feed.flush() is PublishResult.APPLIED
    feed.emit(BlockStored(BLOCKS[1], BLOCKS[0], 0))
    assert feed.flush() is PublishResult.APPLIED
    assert feed.flush() is PublishResult.APPLIED
    assert index.calls == ["replace", "publish", "publish"]
    assert index.leading_blocks(BLOCKS) == {"p0": 2}


def test_a_silent_worker_notices_a_loss(feed: BlockFeed, index: FlakyIndex) -> None:
    feed.emit(BlockStored(BLOCKS[0], None, 0))
    feed.flush()
    index.remove_worker("p0")
    assert feed.flush() is PublishResult.APPLIED
    assert index.holds(BLOCKS[0])


def test_news_after_a_lost_answer_to_an_empty_report_arrive(feed: BlockFeed, index: FlakyIndex) -> None:
    """The repeated report has the number of the empty one, which was applied: it must not carry the new events."""
    feed.flush()
    index.failures = ["answer lost"]
    with pytest.raises(LocalityUnavailableError):
        feed.flush()
    feed.emit(BlockStored(BLOCKS[0], None, 0))
    feed.flush()
    assert index.holds(BLOCKS[0])


def test_a_long_absence_costs_a_snapshot_and_no_memory(index: FlakyIndex) -> None:
    feed = BlockFeed(index, "p0", 1, max_pending=3)
    feed.flush()
    for block_hash in BLOCKS:
        feed.emit(BlockStored(block_hash, None, 0))
    feed.flush()
    assert index.calls == ["replace", "replace"]
    assert index.leading_blocks(BLOCKS) == {"p0": len(BLOCKS)}


def test_a_late_report_does_not_hide_a_lost_snapshot(index: FlakyIndex) -> None:
    feed = BlockFeed(index, "p0", 1, max_pending=1)
    feed.flush()
    feed.emit(BlockStored(BLOCKS[0], None, 0))
    index.failures = ["request late", "request lost"]
    with pytest.raises(LocalityUnavailableError):
        feed.flush()
    feed.emit(BlockStored(BLOCKS[1], None, 0))
    feed.emit(BlockStored(BLOCKS[2], None, 0))  # one too many: the next flush is a snapshot
    with pytest.raises(LocalityUnavailableError):
        feed.flush()
    assert feed.flush() is PublishResult.APPLIED
    assert index.leading_blocks(BLOCKS) == {"p0": 3}


def test_many_events_go_in_several_reports(feed: BlockFeed, index: FlakyIndex) -> None:
    feed.flush()
    for number in range(3000):
        feed.emit(BlockStored(hashlib.sha256(b"%d" % number).digest(), None, 0))
        feed.emit(BlockRemoved(hashlib.sha256(b"%d" % number).digest(), 0))
    feed.emit(BlockStored(BLOCKS[0], None, 0))
    feed.flush()
    assert index.calls == ["replace", "publish", "publish"]
    assert index.holds(BLOCKS[0])
    assert index.stats().num_block_replicas == 1


def test_other_groups_are_not_reported(feed: BlockFeed, index: FlakyIndex) -> None:
    feed.emit(BlockStored(BLOCKS[0], None, 1))
    feed.flush()
    feed.emit(BlockStored(BLOCKS[1], None, 1))
    feed.flush()
    assert index.stats().num_block_replicas == 0


def test_a_former_incarnation_is_told_so(feed: BlockFeed, index: FlakyIndex) -> None:
    feed.flush()
    BlockFeed(index, "p0", 2).flush()
    feed.emit(BlockStored(BLOCKS[0], None, 0))
    assert feed.flush() is PublishResult.STALE
    assert BlockFeed(index, "p0", 1).flush() is PublishResult.STALE
    assert not index.holds(BLOCKS[0])


class UnreliableIndex(RuleBasedStateMachine):
    """Checks that the index holds exactly the worker's blocks once a flush returns APPLIED, after any losses."""

    @initialize()
    def start(self) -> None:
        self.index = FlakyIndex()
        self.held: set[bytes] = set()
        self.epoch = 0
        self.restart()

    @rule()
    def restart(self) -> None:
        self.epoch += 1
        self.held.clear()
        self.feed = BlockFeed(self.index, "p0", self.epoch, max_pending=6)

    @rule(block_hash=st.sampled_from(BLOCKS))
    def change(self, block_hash: bytes) -> None:
        held = block_hash in self.held
        self.held ^= {block_hash}
        self.feed.emit(BlockRemoved(block_hash, 0) if held else BlockStored(block_hash, None, 0))

    @rule(failure=st.sampled_from(["request lost", "request late", "answer lost"]))
    def flush_in_vain(self, failure: str) -> None:
        self.index.failures = [failure]
        with pytest.raises(LocalityUnavailableError):
            self.feed.flush()

    @rule()
    def lose_everything(self) -> None:
        self.index.remove_worker("p0")

    @rule()
    def flush(self) -> None:
        assert self.feed.flush() is PublishResult.APPLIED
        assert {block_hash for block_hash in BLOCKS if self.index.holds(block_hash)} == self.held


UnreliableIndex.TestCase.settings = settings(
    max_examples=100,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    database=None,
    phases=(Phase.explicit, Phase.generate),
)
TestUnreliableIndex = UnreliableIndex.TestCase
