"""Contract of every `LocalityIndex`: the truth, and repair after any loss. Embedded, in a real Redis, and in the
simulation's, whose scripts are the same and whose commands are not.
"""

import contextlib
import hashlib
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import cast

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from redis import Redis

from tandem.core.clock import ManualClock
from tandem.core.errors import ConfigurationError, InvalidRequestError, LocalityUnavailableError
from tandem.core.events import BlockEvent, BlockRemoved, BlockStored
from tandem.core.hashing import resume_name
from tandem.locality.base import SILENT_S, LocalityIndex, PublishResult
from tandem.locality.embedded import EmbeddedIndex
from tandem.locality.redis import RedisIndex
from tests.helpers.redis_server import RedisServer, running_redis
from tests.helpers.simulated_redis import serving_simulated_redis

APPLIED, RESYNC, STALE = PublishResult.APPLIED, PublishResult.RESYNC, PublishResult.STALE
PATIENT_S = 5.0  # for a machine that is busy with other things
LIMIT = 1024


def chain(name: str, length: int) -> list[bytes]:
    return [hashlib.sha256(f"{name} {index}".encode()).digest() for index in range(length)]


def stored(hashes: Iterable[bytes], group: int = 0) -> list[BlockEvent]:
    return [BlockStored(block_hash, None, group) for block_hash in hashes]


def removed(hashes: Iterable[bytes], group: int = 0) -> list[BlockEvent]:
    return [BlockRemoved(block_hash, group) for block_hash in hashes]


@dataclass(frozen=True)
class Backend:
    """Opens empty indexes of one kind, makes one lose everything it knows, has a worker say nothing for some seconds,
    proves that its own accounts are right.
    """

    open: Callable[[int], LocalityIndex]
    lose: Callable[[LocalityIndex, Sequence[str]], object]
    be_silent: Callable[[str, float], object]
    audit: Callable[[], None] = lambda: None


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


def embedded_backend() -> Backend:
    def lose(index: LocalityIndex, workers: Sequence[str]) -> None:
        for worker_id in workers:
            index.remove_worker(worker_id)

    clock = ManualClock()
    return Backend(lambda limit: EmbeddedIndex(limit, clock), lose, lambda worker_id, seconds: clock.advance(seconds))


def redis_backend(url: str, opened: contextlib.ExitStack) -> Backend:
    plain = opened.enter_context(contextlib.closing(Redis.from_url(url)))

    def open_empty(limit: int) -> LocalityIndex:
        plain.flushall()
        index = RedisIndex(url, max_block_replicas=limit, read_timeout_s=PATIENT_S, write_timeout_s=PATIENT_S)
        return opened.enter_context(contextlib.closing(index))

    def be_silent(worker_id: str, seconds: float) -> None:
        date_last_report(plain, worker_id, plain.time()[0] - round(seconds))

    return Backend(open_empty, lambda index, workers: plain.flushall(), be_silent, lambda: audit_redis(plain))


def date_last_report(plain: Redis, worker_id: str, seen_s: int) -> None:
    """As if a worker had last reported when Redis's clock showed `seen_s`."""
    record = plain.hget("{tandem}:locality:meta", f"w:{worker_id}")
    assert isinstance(record, bytes)
    plain.hset("{tandem}:locality:meta", f"w:{worker_id}", record.rsplit(b" ", 1)[0] + b" %d" % seen_s)


def audit_redis(plain: Redis) -> None:
    """Every block is in one generation, and what each counts is what it has."""
    generations = {}
    for name in ("young", "old"):
        entries = plain.hgetall(f"{{tandem}}:locality:{name}")
        entries.pop(b"", None)
        counted = plain.hget("{tandem}:locality:meta", name)
        assert sum(map(len, entries.values())) // 4 == int(counted or 0)
        assert all(entries.values())
        generations[name] = set(entries)
    assert not generations["young"] & generations["old"]


@pytest.fixture(params=["embedded", "redis", "simulated redis"])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    if request.param == "embedded":
        yield embedded_backend()
        return
    with contextlib.ExitStack() as opened:
        if request.param == "redis":
            url = request.getfixturevalue("redis_server").url
        else:
            url = opened.enter_context(serving_simulated_redis(time.time))
        yield redis_backend(url, opened)


@pytest.fixture
def index(backend: Backend) -> LocalityIndex:
    return backend.open(1_000_000)


@pytest.fixture
def in_redis(redis_server: RedisServer) -> Iterator[RedisIndex]:
    with contextlib.closing(redis_server.client()) as plain:
        plain.flushall()
    index = RedisIndex(redis_server.url, read_timeout_s=PATIENT_S, write_timeout_s=PATIENT_S, retry_after_s=0.0)
    with contextlib.closing(index):
        yield index


def test_an_empty_index_knows_nobody(index: LocalityIndex) -> None:
    assert index.leading_blocks(chain("a", 3)) == {}
    assert index.leading_blocks([]) == {}
    assert index.stats().num_workers == index.stats().num_block_replicas == 0


def test_an_unknown_worker_is_asked_for_a_snapshot(index: LocalityIndex) -> None:
    blocks = chain("a", 3)
    assert index.publish("p0", 1, stored(blocks), 0) is RESYNC
    assert index.leading_blocks(blocks) == {}
    assert index.replace("p0", 1, [], 0) is APPLIED
    assert index.publish("p0", 1, stored(blocks), 1) is APPLIED
    assert index.leading_blocks(blocks) == {"p0": 3}


def test_only_leading_blocks_count(index: LocalityIndex) -> None:
    blocks = chain("a", 1500)
    index.replace("whole", 1, blocks, 0)
    index.replace("start", 1, blocks[:40], 0)
    index.replace("gap", 1, blocks[:7] + blocks[8:], 0)
    index.replace("tail", 1, blocks[1:], 0)
    assert index.leading_blocks(blocks) == {"whole": 1500, "start": 40, "gap": 7}
    assert index.leading_blocks(blocks[:30]) == {"whole": 30, "start": 30, "gap": 7}
    assert index.leading_blocks(blocks[1:3]) == {"whole": 2, "start": 2, "gap": 2, "tail": 2}


@pytest.mark.parametrize("length", [1, 15, 16, 17, 18, 47, 48, 700, 1500])
def test_every_prefix_is_counted_to_its_last_block(index: LocalityIndex, length: int) -> None:
    blocks, source = chain("a", length), random.Random(length)
    ends = {1, 2, 15, 16, 17, 31, 47, 48, 49, length - 1, length} | {source.randint(1, length) for _ in range(20)}
    held = {f"p{end}": end for end in ends if 1 <= end <= length}
    for worker_id, end in held.items():
        index.replace(worker_id, 1, blocks[:end], 0)
    assert index.leading_blocks(blocks) == held
    assert index.leading_blocks(blocks + chain("b", 40)) == held
    for worker_id, end in held.items():
        index.publish(worker_id, 1, removed(blocks[end // 2 : end]), 1)
    assert index.leading_blocks(blocks) == {name: end // 2 for name, end in held.items() if end > 1}


def test_events_apply_in_order(index: LocalityIndex) -> None:
    first, second, third = chain("a", 3)
    index.replace("p0", 1, [third], 0)
    events = stored([first, second]) + removed([second, third]) + stored([third]) + removed([first]) + stored([first])
    assert index.publish("p0", 1, events, 1) is APPLIED
    assert index.leading_blocks([first, second]) == {"p0": 1}
    assert index.leading_blocks([third, second]) == {"p0": 1}
    assert index.stats().num_block_replicas == 2


def test_a_report_larger_than_a_script_call_is_one_report(index: LocalityIndex) -> None:
    blocks = chain("a", 3000)
    index.replace("p0", 1, blocks[:5], 0)
    assert index.publish("p0", 1, stored(blocks) + removed(blocks[2000:]), 1) is APPLIED
    assert index.leading_blocks(blocks) == {"p0": 2000}
    assert index.publish("p0", 1, [], 2) is APPLIED


def test_only_group_zero_counts(index: LocalityIndex) -> None:
    blocks = chain("a", 2)
    index.replace("p0", 1, [], 0)
    index.publish("p0", 1, stored(blocks) + removed(blocks, group=1) + stored(chain("b", 2), group=1), 1)
    assert index.leading_blocks(blocks) == {"p0": 2}
    assert index.leading_blocks(chain("b", 2)) == {}


def test_a_gap_is_noticed_and_changes_nothing(index: LocalityIndex) -> None:
    blocks = chain("a", 4)
    index.replace("p0", 1, blocks[:2], 7)
    assert index.publish("p0", 1, stored(blocks), 9) is RESYNC
    assert index.leading_blocks(blocks) == {"p0": 2}
    assert index.replace("p0", 1, blocks[:3], 9) is APPLIED
    assert index.publish("p0", 1, stored(blocks[3:]), 10) is APPLIED
    assert index.leading_blocks(blocks) == {"p0": 4}


def test_a_repeated_report_is_applied_once(index: LocalityIndex) -> None:
    blocks = chain("a", 2)
    index.replace("p0", 1, [], 0)
    index.publish("p0", 1, stored(blocks), 1)
    index.publish("p0", 1, removed(blocks), 2)
    assert index.publish("p0", 1, stored(blocks), 1) is APPLIED
    assert index.leading_blocks(blocks) == {}


def test_a_snapshot_replaces_what_was(index: LocalityIndex) -> None:
    old, new = chain("old", 3), chain("new", 3)
    index.replace("p0", 1, old, 0)
    index.replace("p1", 1, old, 0)
    assert index.replace("p0", 1, new + new, 4) is APPLIED
    assert index.leading_blocks(old) == {"p1": 3}
    assert index.leading_blocks(new) == {"p0": 3}


def test_a_new_epoch_hides_the_old_one_at_once(index: LocalityIndex) -> None:
    blocks = chain("a", 3)
    epoch = 2**63 + 1  # more than a double can tell apart
    index.replace("p0", epoch, blocks, 0)
    assert index.publish("p0", epoch + 1, [], 1) is RESYNC
    assert index.leading_blocks(blocks) == {}
    assert index.replace("p0", epoch + 1, blocks[:1], 0) is APPLIED
    assert index.leading_blocks(blocks) == {"p0": 1}


def test_an_old_epoch_changes_nothing(index: LocalityIndex) -> None:
    blocks = chain("a", 3)
    index.replace("p0", 2**63 + 1, blocks[:1], 0)
    assert index.publish("p0", 2**63, stored(blocks), 1) is STALE
    assert index.replace("p0", 2**63, blocks, 0) is STALE
    assert index.leading_blocks(blocks) == {"p0": 1}


def test_an_old_epoch_changes_nothing_before_the_later_ones_snapshot(index: LocalityIndex) -> None:
    """Redis did not note an epoch whose first report was answered with the wish for a snapshot."""
    blocks = chain("a", 3)
    index.replace("p0", 1, blocks, 0)
    assert index.publish("p0", 2, [], 1) is RESYNC
    assert index.publish("p0", 1, stored(blocks), 1) is STALE
    assert index.replace("p0", 1, blocks, 1) is STALE
    assert index.replace("p0", 2, blocks[:1], 1) is APPLIED
    assert index.leading_blocks(blocks) == {"p0": 1}


def test_an_old_epoch_counts_when_the_later_one_is_silent(index: LocalityIndex, backend: Backend) -> None:
    """Regression: a worker that was restarted after its clock was set back could never report."""
    blocks = chain("a", 3)
    index.replace("p0", 2, blocks, 0)
    backend.be_silent("p0", SILENT_S / 2)
    assert index.publish("p0", 2, [], 1) is APPLIED
    backend.be_silent("p0", SILENT_S / 2)
    assert index.replace("p0", 1, blocks[:1], 0) is STALE
    backend.be_silent("p0", SILENT_S + 1)
    assert index.publish("p0", 1, [], 1) is RESYNC
    assert index.leading_blocks(blocks) == {}
    assert index.replace("p0", 1, blocks[:1], 1) is APPLIED
    assert index.leading_blocks(blocks) == {"p0": 1}
    assert index.publish("p0", 1, stored(blocks), 2) is APPLIED
    assert index.leading_blocks(blocks) == {"p0": 3}


def test_a_snapshot_may_be_the_first_that_an_old_epoch_sends(index: LocalityIndex, backend: Backend) -> None:
    index.replace("p0", 2, chain("a", 3), 0)
    backend.be_silent("p0", SILENT_S + 1)
    assert index.replace("p0", 1, chain("a", 2), 0) is APPLIED
    assert index.leading_blocks(chain("a", 3)) == {"p0": 2}


def test_an_old_epoch_counts_when_the_clock_of_redis_was_set_back_too(
    in_redis: RedisIndex, redis_server: RedisServer
) -> None:
    in_redis.replace("p0", 2, chain("a", 3), 0)
    with contextlib.closing(redis_server.client()) as plain:
        date_last_report(plain, "p0", plain.time()[0] + 3600)
    assert in_redis.replace("p0", 1, chain("a", 2), 0) is APPLIED


def test_a_removed_worker_is_gone_at_once_and_may_come_back(index: LocalityIndex) -> None:
    blocks = chain("a", 3)
    index.replace("p0", 1, blocks, 0)
    index.replace("p1", 1, blocks, 0)
    index.remove_worker("p0")
    index.remove_worker("nobody")
    assert index.leading_blocks(blocks) == {"p1": 3}
    assert index.stats().num_workers == 1
    assert index.publish("p0", 1, [], 1) is RESYNC
    assert index.replace("p0", 1, blocks[:2], 1) is APPLIED
    assert index.leading_blocks(blocks) == {"p0": 2, "p1": 3}


def test_entries_of_the_dead_are_pruned_where_blocks_are_written(index: LocalityIndex) -> None:
    blocks = chain("a", 100)
    for epoch in range(5):
        index.replace("p0", epoch, blocks, 0)
    assert index.stats().num_block_replicas == 100


def test_a_resync_does_not_count_blocks_twice(index: LocalityIndex) -> None:
    """A worker's snapshots share blocks; counting those twice would push out what others hold."""
    blocks = chain("a", 1000)
    index.replace("p1", 1, blocks[:500], 0)
    for sequence in range(3):
        index.replace("p0", 1, blocks, sequence)
        assert index.stats().num_block_replicas == 1500


def test_a_snapshot_is_seen_whole_or_not_at_all(index: LocalityIndex) -> None:
    blocks, lengths = chain("a", 6000), {"p0": 6000, "p1": 1700}

    def report(worker_id: str) -> None:
        for turn in range(10):
            assert index.replace(worker_id, 1, blocks[: lengths[worker_id]], turn) is APPLIED

    with ThreadPoolExecutor(2) as threads:
        reports = [threads.submit(report, worker_id) for worker_id in lengths]
        while not all(done.done() for done in reports):
            assert index.leading_blocks(blocks).items() <= lengths.items()
        assert [done.result() for done in reports] == [None, None]
    assert index.leading_blocks(blocks) == lengths
    assert index.stats().num_block_replicas == 7700


def test_everything_is_rebuilt_after_a_loss(backend: Backend) -> None:
    index, blocks = backend.open(1_000_000), chain("a", 3)
    for worker_id in ("p0", "p1"):
        index.replace(worker_id, 1, blocks, 5)
    backend.lose(index, ("p0", "p1"))
    assert index.leading_blocks(blocks) == {}
    assert index.publish("p0", 1, stored(blocks), 6) is RESYNC
    index.replace("p0", 1, blocks, 6)
    assert index.leading_blocks(blocks) == {"p0": 3}


def test_memory_is_bounded_and_the_untouched_goes_first(backend: Backend) -> None:
    index, popular = backend.open(LIMIT), chain("popular", 100)
    index.replace("p0", 1, popular, 0)
    for number in range(60):
        index.publish("p0", 1, stored(chain(f"one-off {number}", 100)), number + 1)
        assert index.stats().num_block_replicas <= LIMIT
        assert index.leading_blocks(popular + chain(f"tail {number}", 5)) == {"p0": 100}
    assert index.stats().num_rotations > 5
    backend.audit()
    assert index.leading_blocks(chain("one-off 0", 100)) == {}
    assert index.leading_blocks(chain("one-off 59", 100)) == {"p0": 100}


def test_nothing_is_forgotten_while_half_the_bound_is_enough(backend: Backend) -> None:
    index = backend.open(LIMIT)
    index.replace("p0", 1, [], 0)
    for turn in range(20):
        blocks = chain(f"turn {turn}", LIMIT // 2)
        index.publish("p0", 1, stored(blocks), 2 * turn + 1)
        assert index.leading_blocks(blocks) == {"p0": LIMIT // 2}
        index.publish("p0", 1, removed(blocks), 2 * turn + 2)
    assert index.stats().num_rotations == index.stats().num_block_replicas == 0


def test_a_chain_that_is_asked_for_survives_whole(backend: Backend) -> None:
    """Making the start of an old chain young may push the old generation out: the rest of the chain must not go too."""
    index, asked = backend.open(LIMIT), chain("asked", LIMIT // 2)
    index.replace("p0", 1, asked, 0)
    index.publish("p0", 1, stored(chain("other", LIMIT // 2)), 1)
    for _ in range(3):
        assert index.leading_blocks(asked) == {"p0": LIMIT // 2}


def test_states_are_found_at_or_before_the_last_block_that_counts(index: LocalityIndex) -> None:
    """Longer than a script reads at a time; names of states are no blocks, and nobody's count nobody else's."""
    blocks = chain("a", 1300)
    places = {"many": (1, 600, 1300), "one": (40,), "none": (), "gone": (1300,)}
    for worker_id, ends in places.items():
        index.replace(worker_id, 1, blocks + [resume_name(blocks[end - 1]) for end in ends], 0)
    index.remove_worker("gone")
    assert index.leading_blocks(blocks) == {"many": 1300, "one": 1300, "none": 1300}

    def found(**most: int) -> Mapping[str, int]:
        return index.resumable_blocks(blocks, most)

    assert found(many=1300, one=1300, none=1300, gone=1300, unknown=9) == {"many": 1300, "one": 40}
    assert found(many=1299, one=40) == {"many": 600, "one": 40}
    assert found(many=600, one=39) == {"many": 600}
    assert found(many=599, none=1) == {"many": 1}
    assert found(many=0) == found() == {}
    index.publish("many", 1, removed([resume_name(blocks[0])]) + stored([resume_name(blocks[4])]), 1)
    assert found(many=599) == {"many": 5}
    assert found(many=4) == {}


def test_states_that_are_asked_for_survive(backend: Backend) -> None:
    index, asked = backend.open(LIMIT), chain("asked", 40)
    index.replace("p0", 1, [*asked, resume_name(asked[19])], 0)
    for number in range(12):
        index.publish("p0", 1, stored(chain(f"one-off {number}", 200)), number + 1)
        assert index.leading_blocks(asked) == {"p0": 40}
        assert index.resumable_blocks(asked, {"p0": 40}) == {"p0": 20}
    assert index.stats().num_rotations > 2
    backend.audit()


@contextlib.contextmanager
def old_chain(server: RedisServer, length: int, num_young: int) -> Iterator[list[bytes]]:
    """A chain that one worker holds and that is old, as `num_young` blocks were reported after it."""
    blocks = chain("asked", length)
    with contextlib.closing(RedisIndex(server.url, max_block_replicas=2 * length, write_timeout_s=PATIENT_S)) as index:
        index.replace("p0", 1, blocks, 0)
        index.replace("p1", 1, chain("other", num_young), 0)
    yield blocks


@pytest.mark.parametrize("has_room", [True, False])
@pytest.mark.parametrize("num_young", [1, 1500, 2900])
def test_a_long_chain_that_is_asked_for_survives_whole(
    in_redis: RedisIndex, redis_server: RedisServer, num_young: int, has_room: bool
) -> None:
    """Its blocks become young bit by bit, unless the first ones would have the old generation forgotten."""
    with old_chain(redis_server, 3000, num_young) as blocks, contextlib.closing(redis_server.client()) as plain:
        limit = (6 if has_room else 2) * len(blocks)
        for _ in range(3):
            index = RedisIndex(redis_server.url, max_block_replicas=limit, read_timeout_s=PATIENT_S)
            with contextlib.closing(index):
                assert index.leading_blocks(blocks) == {"p0": 3000}
            audit_redis(plain)
        assert (in_redis.stats().num_rotations == 1) == has_room


def test_no_script_makes_a_long_chain_young_at_once(in_redis: RedisIndex, redis_server: RedisServer) -> None:
    """One did, for 100 ms where prompts were long: its own answer came too late, and those of all others with it."""
    with old_chain(redis_server, 3000, 1) as blocks, contextlib.closing(redis_server.client()) as plain:
        changes = [0]
        with plain.monitor() as monitor:  # type: ignore[no-untyped-call]
            index = RedisIndex(redis_server.url, max_block_replicas=6 * len(blocks), read_timeout_s=PATIENT_S)
            with contextlib.closing(index):
                assert index.leading_blocks(blocks) == {"p0": 3000}
            plain.echo("that is all")
            for command in iter(lambda: monitor.next_command()["command"], "ECHO that is all"):
                if command.startswith("EVALSHA"):
                    changes.append(0)
                changes[-1] += command.startswith("HDEL {tandem}:locality:old")
        assert plain.hget("{tandem}:locality:meta", "old") == b"0"
        assert len(changes) > 3000 // 512
        assert max(changes) <= 2  # of 500 blocks at most


def test_popular_blocks_stay_within_the_bound(backend: Backend) -> None:
    index, blocks = backend.open(LIMIT), chain("a", 60)
    for worker in range(40):
        assert index.replace(f"p{worker}", 1, blocks, 0) is APPLIED
        assert index.stats().num_block_replicas <= LIMIT
        backend.audit()


@pytest.mark.parametrize(
    ("worker_id", "epoch", "sequence", "hashes"),
    [
        ("", 1, 1, []),
        ("p0", -1, 1, []),
        ("p0", 2**64, 1, []),
        ("p0", 1, -1, []),
        ("p0", 1, 2**53, []),
        ("p0", 1, 1, [b"x"]),
    ],
)
def test_nonsense_is_refused(
    index: LocalityIndex, worker_id: str, epoch: int, sequence: int, hashes: list[bytes]
) -> None:
    with pytest.raises(InvalidRequestError):
        index.publish(worker_id, epoch, stored(hashes), sequence)
    with pytest.raises(InvalidRequestError):
        index.replace(worker_id, epoch, hashes, sequence)


def test_a_short_hash_cannot_be_asked_for(index: LocalityIndex) -> None:
    with pytest.raises(InvalidRequestError, match="32"):
        index.leading_blocks([b"short"])


@pytest.mark.parametrize("worker_id", ["pod/é ü", '"quoted"\\', "7", "a b\nc", "\x00"])
def test_worker_ids_come_back_as_they_were(index: LocalityIndex, worker_id: str) -> None:
    blocks = chain("a", 1)
    index.replace(worker_id, 1, blocks, 0)
    assert index.leading_blocks(blocks) == {worker_id: 1}


def test_a_bound_too_small_to_work_with_is_refused(backend: Backend) -> None:
    with pytest.raises(ConfigurationError, match="max_block_replicas=10"):
        backend.open(10)


class Oracle:
    """The whole truth: a set of blocks for each worker, and where its reports stand."""

    def __init__(self) -> None:
        self.held: dict[str, set[bytes]] = {}
        self.epoch: dict[str, int] = {}
        self.sequence: dict[str, int] = {}

    def replace(self, worker_id: str, epoch: int, hashes: Iterable[bytes], sequence: int) -> None:
        self.held[worker_id], self.epoch[worker_id], self.sequence[worker_id] = set(hashes), epoch, sequence

    def forget(self, worker_id: str) -> None:
        for known in (self.held, self.epoch, self.sequence):
            known.pop(worker_id, None)

    def leading_blocks(self, hashes: Sequence[bytes]) -> dict[str, int]:
        ends = {
            w: next((i for i, h in enumerate(hashes) if h not in held), len(hashes)) for w, held in self.held.items()
        }
        return {worker_id: end for worker_id, end in ends.items() if end}


WORKERS = ("p0", "p1", "d0")
CHAINS = [chain("shared", 2) + chain(name, 30) for name in "abc"]
one_worker = st.sampled_from(WORKERS)
some_blocks = st.tuples(st.sampled_from(CHAINS), st.integers(0, 32), st.integers(0, 32)).map(
    lambda c: c[0][c[1] : c[2]]
)


class IndexMachine(RuleBasedStateMachine):
    """Reports, losses and restarts in any order; after each step every chain has the answer the oracle gives."""

    def __init__(self, backend: Backend) -> None:
        super().__init__()
        self.backend = backend
        self.index = backend.open(1_000_000)
        self.oracle = Oracle()
        self.incarnations = dict.fromkeys(WORKERS, 0)

    @rule(worker_id=one_worker, kept=some_blocks, lost=some_blocks, order=st.booleans())
    def publish(self, worker_id: str, kept: list[bytes], lost: list[bytes], order: bool) -> None:
        events = stored(kept) + removed(lost) if order else removed(lost) + stored(kept)
        sequence = self.oracle.sequence.get(worker_id, 0) + 1
        result = self.index.publish(worker_id, self.incarnations[worker_id], events, sequence)
        if worker_id not in self.oracle.held:
            assert result is RESYNC
            return
        assert result is APPLIED
        held = self.oracle.held[worker_id]
        self.oracle.held[worker_id] = (held | set(kept)) - set(lost) if order else (held - set(lost)) | set(kept)
        self.oracle.sequence[worker_id] = sequence

    @rule(worker_id=one_worker, blocks=some_blocks, sequence=st.integers(0, 3))
    def snapshot(self, worker_id: str, blocks: list[bytes], sequence: int) -> None:
        assert self.index.replace(worker_id, self.incarnations[worker_id], blocks, sequence) is APPLIED
        self.oracle.replace(worker_id, self.incarnations[worker_id], blocks, sequence)

    @rule(worker_id=one_worker, blocks=some_blocks, ahead=st.integers(2, 5))
    def lose_reports(self, worker_id: str, blocks: list[bytes], ahead: int) -> None:
        sequence = self.oracle.sequence.get(worker_id, 0) + ahead
        assert self.index.publish(worker_id, self.incarnations[worker_id], stored(blocks), sequence) is RESYNC

    @rule(worker_id=one_worker, blocks=some_blocks)
    def report_twice(self, worker_id: str, blocks: list[bytes]) -> None:
        if worker_id in self.oracle.held:
            sequence = self.oracle.sequence[worker_id]
            assert self.index.publish(worker_id, self.incarnations[worker_id], removed(blocks), sequence) is APPLIED

    @rule(worker_id=one_worker)
    def restart(self, worker_id: str) -> None:
        self.incarnations[worker_id] += 1
        assert self.index.publish(worker_id, self.incarnations[worker_id], [], 1) is RESYNC
        self.oracle.forget(worker_id)

    @rule(worker_id=one_worker, blocks=some_blocks)
    def report_late(self, worker_id: str, blocks: list[bytes]) -> None:
        if self.oracle.epoch.get(worker_id, 0) > 0:
            epoch = self.oracle.epoch[worker_id] - 1
            assert self.index.publish(worker_id, epoch, stored(blocks), 1) is STALE
            assert self.index.replace(worker_id, epoch, blocks, 1) is STALE

    @rule(worker_id=one_worker)
    def remove(self, worker_id: str) -> None:
        self.index.remove_worker(worker_id)
        self.oracle.forget(worker_id)

    @rule()
    def lose_everything(self) -> None:
        self.backend.lose(self.index, WORKERS)
        for worker_id in WORKERS:
            self.oracle.forget(worker_id)

    @invariant()
    def answers_are_true(self) -> None:
        for blocks in CHAINS:
            assert self.index.leading_blocks(blocks) == self.oracle.leading_blocks(blocks)
        stats = self.index.stats()
        assert stats.num_workers == len(self.oracle.held)
        assert stats.num_block_replicas >= sum(map(len, self.oracle.held.values()))

    def teardown(self) -> None:
        self.backend.audit()


class CrowdedMachine(IndexMachine):
    """The same with old and young entries mixed: a bystander's one-off blocks keep the generations turning."""

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self.index = backend.open(2048)
        self.noise = 0
        self.make_noise()

    @rule()
    def make_noise(self) -> None:
        self.noise += 1
        self.index.replace("noise", self.noise, chain(f"noise {self.noise}", 400), 0)
        self.index.remove_worker("noise")

    @invariant()
    def answers_are_true(self) -> None:
        for blocks in CHAINS:
            truth = self.oracle.leading_blocks(blocks)
            found = self.index.leading_blocks(blocks)
            assert all(count <= truth.get(worker_id, 0) for worker_id, count in found.items())
        assert self.index.stats().num_block_replicas <= 2048


BUDGET = settings(
    max_examples=40,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    database=None,
    phases=(Phase.explicit, Phase.generate),
)


@pytest.mark.parametrize("machine", [IndexMachine, CrowdedMachine])
def test_any_history_gives_the_oracles_answers(backend: Backend, machine: type[IndexMachine]) -> None:
    factory = cast(type[RuleBasedStateMachine], lambda: machine(backend))
    run_state_machine_as_test(factory, settings=BUDGET)


def test_two_clients_of_one_redis_agree(in_redis: RedisIndex, redis_server: RedisServer) -> None:
    blocks = chain("a", 50)
    with contextlib.closing(RedisIndex(redis_server.url, read_timeout_s=PATIENT_S)) as other:
        in_redis.replace("p0", 1, blocks, 0)
        other.replace("p1", 1, blocks[:20], 0)
        assert other.publish("p0", 1, removed(blocks[40:]), 1) is APPLIED
        assert in_redis.publish("p0", 1, [], 1) is APPLIED
        assert in_redis.publish("p0", 1, stored(blocks[40:41]), 2) is APPLIED
        for client in (in_redis, other):
            assert client.leading_blocks(blocks) == {"p0": 41, "p1": 20}
        other.remove_worker("p0")
        assert in_redis.leading_blocks(blocks) == {"p1": 20}
        assert in_redis.stats() == other.stats()


def test_the_bound_of_who_asks_holds_for_who_reports(in_redis: RedisIndex, redis_server: RedisServer) -> None:
    """A worker opens the index without a bound of its own; a router has one."""
    router = RedisIndex(redis_server.url, max_block_replicas=LIMIT, read_timeout_s=PATIENT_S)
    with contextlib.closing(router), contextlib.closing(redis_server.client()) as plain:
        for incarnation in range(2):
            in_redis.replace("p0", 1, [], 0)
            router.leading_blocks(chain("a", 1))
            for i in range(10):
                in_redis.publish("p0", 1, stored(chain(f"{incarnation} {i}", LIMIT // 4)), i + 1)
            assert LIMIT // 4 < router.stats().num_block_replicas <= LIMIT
            in_redis.replace("p1", 1, chain("b", 3 * LIMIT), 0)
            assert LIMIT // 4 < router.stats().num_block_replicas <= LIMIT
            audit_redis(plain)
            plain.flushall()


def test_a_bound_that_is_lowered_holds_once_as_much_was_reported(
    in_redis: RedisIndex, redis_server: RedisServer
) -> None:
    in_redis.replace("p0", 1, chain("a", 3 * LIMIT), 0)
    assert in_redis.leading_blocks(chain("a", 3 * LIMIT)) == {"p0": 3 * LIMIT}
    with contextlib.closing(RedisIndex(redis_server.url, max_block_replicas=LIMIT, read_timeout_s=PATIENT_S)) as router:
        router.leading_blocks(chain("a", 1))
        in_redis.publish("p0", 1, stored(chain("b", LIMIT)), 1)
        assert router.stats().num_block_replicas <= LIMIT


def test_forgotten_scripts_are_loaded_again(in_redis: RedisIndex, redis_server: RedisServer) -> None:
    blocks = chain("a", 2000)
    in_redis.replace("p0", 1, blocks, 0)
    with contextlib.closing(redis_server.client()) as plain:
        plain.script_flush()
        assert in_redis.leading_blocks(blocks) == {"p0": 2000}
        plain.script_flush()
        assert in_redis.publish("p0", 1, removed(blocks[1000:]), 1) is APPLIED
    assert in_redis.leading_blocks(blocks) == {"p0": 1000}


def test_a_killed_redis_is_reported_and_found_again(in_redis: RedisIndex, redis_server: RedisServer) -> None:
    blocks = chain("a", 5)
    in_redis.replace("p0", 1, blocks, 0)
    redis_server.kill()
    try:
        for call in (
            lambda: in_redis.leading_blocks(blocks),
            lambda: in_redis.publish("p0", 1, [], 1),
            lambda: in_redis.replace("p0", 1, blocks, 1),
            lambda: in_redis.remove_worker("p0"),
            in_redis.stats,
        ):
            with pytest.raises(LocalityUnavailableError):
                call()
    finally:
        redis_server.start()
    assert in_redis.leading_blocks(blocks) == {}
    assert in_redis.publish("p0", 1, [], 1) is RESYNC
    in_redis.replace("p0", 1, blocks, 1)
    assert in_redis.leading_blocks(blocks) == {"p0": 5}


def test_a_restart_between_two_calls_goes_unnoticed(in_redis: RedisIndex, redis_server: RedisServer) -> None:
    blocks = chain("a", 5)
    in_redis.replace("p0", 1, blocks, 0)
    redis_server.kill()
    redis_server.start()
    assert in_redis.leading_blocks(blocks) == {}
    assert in_redis.replace("p0", 1, blocks, 1) is APPLIED


def test_a_paused_redis_costs_one_timeout_and_then_nothing(redis_server: RedisServer) -> None:
    blocks, clock = chain("a", 5), ManualClock()
    with contextlib.closing(RedisIndex(redis_server.url, clock=clock)) as index:
        index.replace("p0", 1, blocks, 0)
        with redis_server.paused():
            started_s = time.monotonic()
            for _ in range(100):
                with pytest.raises(LocalityUnavailableError):
                    index.leading_blocks(blocks)
            assert time.monotonic() - started_s < 4.0, "each of them waited for 50 ms"
        clock.advance(1.0)
    with contextlib.closing(RedisIndex(redis_server.url, clock=clock, read_timeout_s=PATIENT_S)) as index:
        assert index.leading_blocks(blocks) == {"p0": 5}


def test_a_late_answer_is_not_taken_for_the_next_one(in_redis: RedisIndex, redis_server: RedisServer) -> None:
    """After a timeout the answer is still on its way; the connection must not be used again."""
    first, second = chain("a", 5), chain("b", 7)
    in_redis.replace("p0", 1, first + second, 0)
    hasty = RedisIndex(redis_server.url, read_timeout_s=0.5, retry_after_s=0.0)
    with contextlib.closing(hasty):
        assert hasty.leading_blocks(first) == {"p0": 5}
        with redis_server.paused(), pytest.raises(LocalityUnavailableError):
            hasty.leading_blocks(first)
        assert hasty.leading_blocks(second) == {"p0": 7}


def test_a_full_redis_is_reported(in_redis: RedisIndex, redis_server: RedisServer) -> None:
    blocks = chain("a", 5)
    in_redis.replace("p0", 1, blocks, 0)
    with contextlib.closing(redis_server.client()) as plain:
        plain.config_set("maxmemory", 1)
        try:
            with pytest.raises(LocalityUnavailableError, match="full"):
                in_redis.publish("p0", 1, stored(blocks), 1)
            assert in_redis.leading_blocks(blocks) == {"p0": 5}
        finally:
            plain.config_set("maxmemory", 0)
    assert in_redis.publish("p0", 1, removed(blocks[3:]), 1) is APPLIED
    assert in_redis.leading_blocks(blocks) == {"p0": 3}


def test_a_full_redis_still_answers_for_old_blocks(redis_server: RedisServer) -> None:
    """A question makes blocks young, which is a write that a full Redis refuses."""
    old, young = chain("old", 500), chain("young", 100)
    with contextlib.closing(redis_server.client()) as plain:
        plain.flushall()
        index = RedisIndex(redis_server.url, max_block_replicas=LIMIT, read_timeout_s=PATIENT_S)
        with contextlib.closing(index):
            index.replace("p0", 1, old, 0)
            index.publish("p0", 1, stored(young), 1)
            assert index.stats().num_rotations == 1
            plain.config_set("maxmemory", 1)
            try:
                assert index.leading_blocks(old) == {"p0": 500}
            finally:
                plain.config_set("maxmemory", 0)


@pytest.mark.parametrize("key", ["meta", "young", "old"])
@pytest.mark.parametrize("damage", ["deleted", "string", "list", "emptied", "garbage"])
def test_damaged_keys_lose_hints_and_are_repaired(
    in_redis: RedisIndex, redis_server: RedisServer, key: str, damage: str
) -> None:
    blocks, name = chain("a", 5), f"{{tandem}}:locality:{key}"
    in_redis.replace("p0", 1, blocks, 0)
    with contextlib.closing(redis_server.client()) as plain:
        if damage == "garbage":
            for field in list(plain.hkeys(name)):
                plain.hset(name, field, b"\xff\x00 nonsense")
        else:
            plain.delete(name)
        if damage == "string":
            plain.set(name, b"\xff\x00")
        elif damage == "list":
            plain.rpush(name, b"x")
        elif damage == "emptied":
            plain.hset(name, b"x", b"y")
    assert in_redis.leading_blocks(blocks) == {}
    assert in_redis.stats().num_workers == 0
    in_redis.remove_worker("p1")
    assert in_redis.publish("p0", 1, [], 1) is RESYNC
    assert in_redis.replace("p0", 1, blocks, 1) is APPLIED
    assert in_redis.leading_blocks(blocks) == {"p0": 5}


@pytest.mark.parametrize("garbage", [b"", b"\xff", b"\xff" * 4, b"\xff" * 7, b"longer nonsense!", b"long" * 10_000])
def test_one_damaged_entry_costs_that_entry(in_redis: RedisIndex, redis_server: RedisServer, garbage: bytes) -> None:
    blocks = chain("a", 5)
    in_redis.replace("p0", 1, blocks, 0)
    with contextlib.closing(redis_server.client()) as plain:
        plain.hset("{tandem}:locality:young", blocks[3][:15], garbage)
    assert in_redis.leading_blocks(blocks) == {"p0": 3}
    assert in_redis.publish("p0", 1, stored(blocks[3:4]), 1) is APPLIED
    assert in_redis.leading_blocks(blocks) == {"p0": 5}


@pytest.mark.parametrize("garbage", [b"", b"\xff\xfe", b"1 1 3 4 5", b"\0\0\0\x021 " + b"0" * 20 + b" 0 0"])
@pytest.mark.parametrize("field", [b"w:p0", b"s:\x00\x00\x00\x01"])
def test_a_damaged_worker_record_costs_that_worker(
    in_redis: RedisIndex, redis_server: RedisServer, field: bytes, garbage: bytes
) -> None:
    blocks = chain("a", 5)
    in_redis.replace("p0", 1, blocks, 0)
    in_redis.replace("p1", 1, blocks, 0)
    with contextlib.closing(redis_server.client()) as plain:
        assert plain.hexists("{tandem}:locality:meta", field)
        plain.hset("{tandem}:locality:meta", field, garbage)
    assert in_redis.leading_blocks(blocks) == {"p1": 5}
    assert in_redis.publish("p0", 1, [], 1) is RESYNC
    assert in_redis.replace("p0", 1, blocks[:2], 1) is APPLIED
    assert in_redis.leading_blocks(blocks) == {"p0": 2, "p1": 5}


def test_keys_of_a_dead_deployment_vanish(in_redis: RedisIndex, redis_server: RedisServer) -> None:
    with contextlib.closing(redis_server.client()) as plain:
        in_redis.replace("p0", 1, chain("a", 5), 0)
        keys = plain.keys("*")
        assert len(keys) == 3
        assert all(0 < plain.pttl(key) <= 600_000 for key in keys)
        small = RedisIndex(redis_server.url, max_block_replicas=LIMIT, write_timeout_s=PATIENT_S, ttl_s=30.0)
        with contextlib.closing(small):
            small.replace("p0", 1, chain("b", 2 * LIMIT), 1)
            assert small.stats().num_rotations > 0
        assert all(0 < plain.pttl(key) <= 30_000 for key in keys)


def test_a_worker_that_fell_silent_is_forgotten_when_another_one_starts(
    in_redis: RedisIndex, redis_server: RedisServer
) -> None:
    in_redis.replace("silent", 1, chain("a", 5), 0)
    with contextlib.closing(redis_server.client()) as plain:
        date_last_report(plain, "silent", plain.time()[0] - 601)
    in_redis.replace("fresh", 1, chain("a", 2), 0)
    assert in_redis.leading_blocks(chain("a", 5)) == {"fresh": 2}
    assert in_redis.stats().num_workers == 1


def test_two_deployments_share_a_redis(in_redis: RedisIndex, redis_server: RedisServer) -> None:
    other = RedisIndex(redis_server.url, prefix="{other}:locality", read_timeout_s=PATIENT_S)
    with contextlib.closing(other):
        in_redis.replace("p0", 1, chain("a", 5), 0)
        assert other.leading_blocks(chain("a", 5)) == {}


@pytest.mark.parametrize("prefix", ["tandem", "{}:x", "}{"])
def test_a_prefix_without_a_hash_tag_is_refused(prefix: str) -> None:
    with pytest.raises(ConfigurationError, match="hash tag"):
        RedisIndex("redis://127.0.0.1:1", prefix=prefix)


@pytest.mark.parametrize("url", ["http://127.0.0.1", "http://user:a-password@127.0.0.1"])
def test_a_url_that_is_not_redis_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(ConfigurationError, match=r"127\.0\.0\.1.*write redis://") as refusal:
        RedisIndex(url)
    assert "a-password" not in str(refusal.value)
