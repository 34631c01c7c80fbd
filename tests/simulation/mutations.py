"""Bugs of one line, planted one at a time in production code: what the simulation must find within a few seeds.

Each replaces a method or function for the time of a context. None touches the simulation itself.
"""

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest

from tandem.accounts import redis_store
from tandem.accounts.accounts import Accounts
from tandem.accounts.errors import AccountsUnavailableError
from tandem.accounts.journal import Journal
from tandem.accounts.settlements import Settlements
from tandem.core.errors import IncompatibleProtocolError, InvalidRequestError, WorkerLostError
from tandem.core.hashing import root_hash
from tandem.core.machine import random_id, wall_s
from tandem.engine import engine, ranks
from tandem.engine.async_engine import AsyncEngine
from tandem.gateway import accounts_usage, assembly, choices, pin_book
from tandem.gateway.accounts import Bill
from tandem.gateway.journey import Journey
from tandem.gateway.pairing_queues import PairingQueues
from tandem.gateway.stalls import StallWatch
from tandem.gateway.update_queue import UpdateQueue
from tandem.kube.candidate import Candidate
from tandem.kube.leader import LeaderElection
from tandem.kvcache.block_pool import BlockPool
from tandem.kvcache.manager import HoldKind, KVCacheManager
from tandem.kvcache.promised_blocks import PromisedBlocks
from tandem.locality.base import PublishResult
from tandem.planner_service.scrape import GatewayScraper
from tandem.process import discovery_redis, fleet_view
from tandem.process.discovery_redis import RedisDiscovery
from tandem.process.fleet_view import FleetView
from tandem.ranks import group
from tandem.ranks.epoch import Epoch
from tandem.ranks.group import RankGroup
from tandem.ranks.heartbeat import Heartbeats
from tandem.redis_client import answered_within
from tandem.rpc import prompt_reuse, session_table
from tandem.rpc.form import Form
from tandem.rpc.messages import ConfirmAnswer, WorkerStatus
from tandem.rpc.prompt_reuse import RememberedPrompts
from tandem.rpc.protocols import SPOKEN
from tandem.rpc.shared_outbox import SharedOutbox
from tandem.rpc.shared_stream import _Inbox
from tandem.scheduler.scheduler import Scheduler
from tandem.transport.transfer import Transfer
from tandem.worker import service
from tandem.worker.feeds import RouterIndex
from tandem.worker.fetch import Fetch
from tandem.worker.host_tier import HostPages
from tandem.worker.leases import LeaseBook
from tandem.worker.remote_prefill import RemotePrefill
from tandem.worker.service import WorkerService
from tandem.worker.source import KVSource
from tandem.worker.transfer_hold import TransferHold

Patch = pytest.MonkeyPatch


@dataclass(frozen=True, slots=True)
class Mutation:
    """One planted bug: how it is planted, and a seed that finds it; None: no seed does, and `unfound` says why."""

    name: str
    plant: Callable[[Patch], None]
    seed: int | None = None
    unfound: str = ""


def never_confirmed(patch: Patch) -> None:
    async def confirm(*_: Any) -> None: ...

    patch.setattr(Fetch, "_confirm", confirm)


def confirmed_before_the_read(patch: Patch) -> None:
    async def read(self: Any, source: Any, lease_id: str, entries: Any, offered: Any) -> None:
        await self._former_over(entries)
        await self._confirm(source, lease_id, [], [], [])
        await self._moved(source, entries, [offered[e] for e in entries], [self._wanted[e] for e in entries])

    patch.setattr(Fetch, "_read", read)


def _ended_lease_confirmed(patch: Patch) -> None:
    async def confirm(self: Any, call: Any) -> ConfirmAnswer:
        blocks = [(0, (block_id,)) for block_id in call.checksum_block_ids]
        return ConfirmAnswer(True, tuple(self._core.checksums.as_read(blocks, (1, ()))))

    patch.setattr(WorkerService, "confirm", confirm)


def _leased_blocks_not_held(patch: Patch) -> None:
    hold = KVCacheManager.hold

    def without_leases(self: Any, name: str, block_ids: Any, kind: HoldKind) -> None:
        if kind is not HoldKind.LEASED:
            hold(self, name, block_ids, kind)

    patch.setattr(KVCacheManager, "hold", without_leases)


def _transfer_holds_end_with_the_request(patch: Patch) -> None:
    patch.setattr(TransferHold, "add", lambda self, transfer: None)


def _leases_do_not_expire(patch: Patch) -> None:
    patch.setattr(LeaseBook, "expire", lambda self: [])


def _expired_lease_keeps_its_hold(patch: Patch) -> None:
    def expire(self: Any, lease_id: str) -> None:
        self.num_expired += 1
        del self._leases[lease_id]

    patch.setattr(LeaseBook, "_expire", expire)


def _broken_prefill_keeps_its_lease(patch: Patch) -> None:
    def end(self: Any, lease_id: str) -> None:
        self._leases.pop(lease_id, None)

    patch.setattr(LeaseBook, "end", end)


def _salt_left_out(patch: Patch) -> None:
    def unsalted(scope: Any, **fields: Any) -> bytes:
        return root_hash(replace(scope, salt=""), **fields)

    for module in (assembly, engine, fleet_view, pin_book, service):
        patch.setattr(module, "root_hash", unsalted)


def _cursor_one_block_too_far(patch: Patch) -> None:
    arrived: Any = vars(Fetch)["num_arrived_tokens"].fget

    def further(self: Any) -> int:
        found = int(arrived(self))
        return found if not self._wanted else found + int(self._core.block_size)

    patch.setattr(Fetch, "num_arrived_tokens", property(further))


def _failed_fetch_counts_as_whole(patch: Patch) -> None:
    patch.setattr(Fetch, "num_arrived_tokens", property(lambda self: self._reserved.num_expected_tokens))


def _block_counts_before_it_arrived(patch: Patch) -> None:
    read = Fetch._read

    async def early(self: Any, source: Any, lease_id: str, entries: Any, offered: Any) -> None:
        wanted = dict(self._wanted)
        for entry in entries:
            del self._wanted[entry]
        self._core.engine.note_kv_offered(self._reserved.request_id, self.num_arrived_tokens)
        self._wanted = wanted
        await read(self, source, lease_id, entries, offered)

    patch.setattr(Fetch, "_read", early)


def _retry_charges_again(patch: Patch) -> None:
    tell = Settlements._tell

    async def anew(self: Any, settlement: Any) -> bool:
        if await tell(self, settlement):
            return True
        await asyncio.sleep(0.5)
        entry = replace(settlement.entry, charge_id=random_id())
        self._waiting.append(
            type(self._waiting[0] if self._waiting else _item(settlement))(replace(settlement, entry=entry))
        )
        return True

    patch.setattr(Settlements, "_tell", anew)


def _item(settlement: Any) -> Any:
    from tandem.accounts.settlements import _Item

    return _Item(settlement)


def _settled_twice(patch: Patch) -> None:
    settle = Accounts.settle

    def twice(self: Any, held: Any, usage: Any, outcome: Any) -> Any:
        first = settle(self, held, usage, outcome)
        again = replace(held.charge, charge_id=random_id())
        settle(self, type(held)(again, held.request_id, held.model, held.rate_limits), usage, outcome)
        return first

    patch.setattr(Accounts, "settle", twice)


def lost_settlements_are_not_told_again(patch: Patch) -> None:
    patch.setattr(Settlements, "resend", lambda self: 0)


def _aborts_are_not_billed(patch: Patch) -> None:
    close = Bill.close

    def only_failures(self: Any, ends: Any, *, is_abort: bool, was_heard: bool) -> None:
        if not is_abort:
            close(self, ends, is_abort=is_abort, was_heard=was_heard)

    patch.setattr(Bill, "close", only_failures)


def _failover_begins_anew(patch: Patch) -> None:
    call = Journey._call
    patch.setattr(Journey, "_call", lambda self, pairing: replace(call(self, pairing), output_token_ids=()))


def _failover_repeats_a_token(patch: Patch) -> None:
    call = Journey._call

    def shorter(self: Any, pairing: Any) -> Any:
        made = call(self, pairing)
        return replace(made, output_token_ids=made.output_token_ids[:-1])

    patch.setattr(Journey, "_call", shorter)


def _tokens_are_dropped(patch: Patch) -> None:
    put = UpdateQueue.put

    async def sometimes(self: Any, update: Any) -> None:
        if len(update.token_ids) > 1:
            update = replace(update, token_ids=update.token_ids[:-1])
        await put(self, update)

    patch.setattr(UpdateQueue, "put", sometimes)


def silence_is_not_noticed(patch: Patch) -> None:
    patch.setattr(StallWatch, "_end", lambda self, worker, asked_s, reason: None)


def _dead_workers_stay_listed(patch: Patch) -> None:
    patch.setattr(FleetView, "mark_lost", lambda self, address: None)


def _block_freed_with_a_reference_left(patch: Patch) -> None:
    def release(self: Any, block_ids: Any) -> None:
        for block_id in block_ids:
            if block_id and self._references[block_id] > 0:
                self._references[block_id] = 0
                self._num_used -= 1
                self._retire(block_id)

    patch.setattr(BlockPool, "release", release)


def _evicted_block_stays_findable(patch: Patch) -> None:
    def free_pages(self: Any) -> None:
        block_id, _ = self._cached.popitem(last=False)
        self._forget_cached(block_id)
        self._free_block(block_id)

    patch.setattr(BlockPool, "_free_pages", free_pages)


def _unfinished_block_offered(patch: Patch) -> None:
    commit = KVCacheManager.commit

    def one_more(self: Any, owner: str, hashes: Sequence[bytes], num_computed_tokens: int) -> None:
        size = self.layout.block_size
        ahead = num_computed_tokens + size if num_computed_tokens % size else num_computed_tokens
        commit(self, owner, hashes, min(ahead, self._tables[owner].num_blocks * size))

    patch.setattr(KVCacheManager, "commit", one_more)


def first_token_taken_again(patch: Patch) -> None:
    def take(self: Any, request_id: str, token_id: int) -> Any:
        request = self._requests.get(request_id)
        if request is None or request.state.name == "RUNNING":
            return None
        request.append(token_id)
        request.extend_hashes(self._kv.layout.block_size)
        if request.finish_reason is not None:
            self._remove(request)
        return request

    patch.setattr(Scheduler, "take_token", take)


def _engine_not_told_that_no_kv_comes(patch: Patch) -> None:
    finish = RemotePrefill._finish

    def only_when_whole(self: Any) -> None:
        if self._fetch.done() and not self._fetch.cancelled() and self._fetch.result().is_complete:
            finish(self)

    patch.setattr(RemotePrefill, "_finish", only_when_whole)


def broken_stream_ends_nobody(patch: Patch) -> None:
    end = _Inbox.end

    def only_by_the_worker(self: Any, error: Any) -> None:
        if error is None or "was lost" not in str(error):
            end(self, error)

    patch.setattr(_Inbox, "end", only_by_the_worker)


def _update_overtakes(patch: Patch) -> None:
    def append(self: Any, number: int, item: Any) -> None:
        self._items.setdefault(number, []).insert(0, item)

    patch.setattr(SharedOutbox, "_append", append)


def lost_source_still_used(patch: Patch) -> None:
    async def ping(self: Any) -> None:
        import asyncio

        await asyncio.Event().wait()

    patch.setattr(KVSource, "_ping", ping)


def _announced_once(patch: Patch) -> None:
    announce = RedisDiscovery.announce

    async def once(self: Any, record: Any) -> None:
        if not hasattr(self, "_was_announced"):
            self._was_announced = True
            await announce(self, record)

    patch.setattr(RedisDiscovery, "announce", once)


def ends_by_own_clock(patch: Patch) -> None:
    async def announce(self: Any, record: Any) -> None:
        name = discovery_redis._name(record)
        async with self._answering():
            until_ms = int(wall_s() * 1000) + self._ttl_ms
            sealed = self._sealer.seal(name, until_ms, discovery_redis._encoded(record))
            await self._client.eval(discovery_redis.ANNOUNCE, 1, self._key, name, sealed, self._ttl_ms, record.epoch)

    patch.setattr(RedisDiscovery, "announce", announce)


def _lost_redis_is_a_bug(patch: Patch) -> None:
    @asynccontextmanager
    async def answering(self: Any) -> AsyncIterator[None]:
        async with answered_within(self._timeout_s):
            yield

    patch.setattr(RedisDiscovery, "_answering", answering)


def _followers_write(patch: Patch) -> None:
    patch.setattr(LeaderElection, "is_leader", property(lambda self: True))


def _held_lease_taken(patch: Patch) -> None:
    def bid(self: Any, now_s: float, wall_s: float) -> Any:
        known = self._known
        return self._written(known, wall_s, wall_s, known.num_transitions + 1)

    patch.setattr(Candidate, "bid", bid)


def _leads_for_ever(patch: Patch) -> None:
    def won(self: Any, written: Any, asked_s: float, now_s: float) -> None:
        self._known, self._known_since_s, self._leads_until_s = written, now_s, float("inf")

    patch.setattr(Candidate, "won", won)


def shrinks_blindly(patch: Patch) -> None:
    scrape = GatewayScraper.scrape

    async def seen(self: Any) -> Any:
        return replace(await scrape(self), problems=())

    patch.setattr(GatewayScraper, "scrape", seen)


def _lost_api_ends_the_election(patch: Patch) -> None:
    async def round_of(self: Any) -> None:
        async with asyncio.timeout(self._candidate.terms.renew_deadline_s):
            await self._stand()
        self._tell()

    patch.setattr(LeaderElection, "round", round_of)


def _seeds_of_choices_alike(patch: Patch) -> None:
    patch.setattr(choices, "choice_seed", lambda seed, choice: seed)


def _first_choice_is_billed(patch: Patch) -> None:
    patch.setattr(accounts_usage, "_by_prompt", lambda choices: iter([[0]]))


def _full_store_loses_settlements(patch: Patch) -> None:
    async def tell(self: Any, settlement: Any) -> bool:
        try:
            await self._store.settle(settlement)
        except AccountsUnavailableError as error:
            return "No space left" in str(error)
        return True

    patch.setattr(Settlements, "_tell", tell)


def _full_disk_is_a_bug(patch: Patch) -> None:
    async def write(self: Any, journal: Any) -> bool:
        items = tuple(self._unkept)
        self._is_journal_empty = False
        await asyncio.to_thread(journal.add, [item.settlement for item in items])
        for item in items:
            self._unkept.pop(item, None)
        return True

    patch.setattr(Settlements, "_write", write)


def journal_is_not_read(patch: Patch) -> None:
    patch.setattr(Journal, "read", lambda self: [])


def _neighbours_are_refused(patch: Patch) -> None:
    def equal(theirs: Any, ours: Any = SPOKEN) -> int:
        if theirs != ours:
            raise IncompatibleProtocolError(f"{theirs} is not {ours}")
        return int(ours[1])

    patch.setattr(session_table, "newest_common", equal)


def _usage_is_required(patch: Patch) -> None:
    decode = Form.decode

    def strict(self: Any, data: bytes) -> Any:
        value = decode(self, data)
        if isinstance(value, WorkerStatus) and value.usage is None:
            raise InvalidRequestError("status.usage is missing")
        return value

    patch.setattr(Form, "decode", strict)


def moved_blocks_are_not_copied(patch: Patch) -> None:
    patch.setattr(HostPages, "store", lambda self, pairs: None)


def restored_blocks_are_not_copied(patch: Patch) -> None:
    patch.setattr(HostPages, "load", lambda self, reads: None)


def _pins_do_not_end(patch: Patch) -> None:
    patch.setattr(PromisedBlocks, "expire", lambda self, now_s: None)


def _replaced(script: str, code: str, planted: str) -> Callable[[Patch], None]:
    """In a Lua script of the accounts."""

    def plant(patch: Patch) -> None:
        text = getattr(redis_store, script)
        assert code in text, f"{script} has no {code!r}"
        patch.setattr(redis_store, script, text.replace(code, planted))

    return plant


def _new_ranks_begin_with_empty_memory(patch: Patch) -> None:
    prepare = Epoch.prepare

    def emptied(self: Any, fingerprint: str, sizes: Any, *, keeps_pages: bool) -> None:
        prepare(self, fingerprint, sizes, keeps_pages=False)

    patch.setattr(Epoch, "prepare", emptied)


def _former_ranks_are_left(patch: Patch) -> None:
    def close(self: Any) -> None:
        self._stop_watching()

    patch.setattr(Epoch, "close", close)


def _step_ends_before_all_have_written(patch: Patch) -> None:
    for module in (ranks, group):
        patch.setattr(module, "await_kv", lambda step, links: None)


def nobody_hears_of_lost_ranks(patch: Patch) -> None:
    recover = AsyncEngine._recover

    def unsaid(self: Any, lost: Any) -> None:
        for request_id in self._streams:
            self._engine.abort(request_id)
        self._streams.clear()
        recover(self, lost)

    patch.setattr(AsyncEngine, "_recover", unsaid)


def waiting_requests_hear_nothing_of_lost_ranks(patch: Patch) -> None:
    recover = AsyncEngine._recover

    def unsaid(self: Any, lost: Any) -> None:
        waiting = {r.request_id for r in self._engine._scheduler.requests if r.state.name == "WAITING"}
        for request_id in waiting & set(self._streams):
            self._engine.abort(request_id)
            del self._streams[request_id]
        recover(self, lost)

    patch.setattr(AsyncEngine, "_recover", unsaid)


def no_snapshot_for_a_new_router(patch: Patch) -> None:
    publish = RouterIndex.publish

    def published(self: Any, *given: Any) -> Any:
        result = publish(self, *given)
        return PublishResult.APPLIED if result is PublishResult.RESYNC else result

    patch.setattr(RouterIndex, "publish", published)


def silent_ranks_are_not_noticed(patch: Patch) -> None:
    patch.setattr(Heartbeats, "silent_rank", lambda self, beats, now_s: None)


def idle_group_is_not_watched(patch: Patch) -> None:
    patch.setattr(RankGroup, "_tell_lost", lambda self: None)


def _one_ranks_part_counts_for_all(patch: Patch) -> None:
    patch.setattr(Transfer, "joined", lambda parts, clock: parts[0])


def refusing_worker_is_not_asked_again(patch: Patch) -> None:
    async def may_go_on(self: Any, worker: Any) -> bool:
        errors = [error for failed, error in self._failed if failed == worker]
        is_lost = not errors or isinstance(errors[-1], WorkerLostError)
        return is_lost and (not errors or await self._context.stalls.is_back(worker))

    patch.setattr(Journey, "_may_go_on", may_go_on)


def forgotten_prompts_count_as_empty(patch: Patch) -> None:
    def grown(self: Any, named: Any, known: int) -> Any:
        kept = self._prompts.get((named.keeper, known), array("I"))[: named.num_known]
        kept.extend(named.more_token_ids)
        return kept

    patch.setattr(RememberedPrompts, "_grown", grown)


def _prompts_share_a_token_too_many(patch: Patch) -> None:
    shared = prompt_reuse._num_shared
    patch.setattr(prompt_reuse, "_num_shared", lambda first, second: shared(first, second) + 1)


def _words_of_former_epochs_count(patch: Patch) -> None:
    receive = Epoch._receive

    def any_epoch(self: Any, rank: int, kind: Any) -> Any:
        self._id, former = _AnyEpoch(), self._id
        try:
            return receive(self, rank, kind)
        finally:
            self._id = former

    patch.setattr(Epoch, "_receive", any_epoch)


class _AnyEpoch(str):
    """Equals every other."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = str.__hash__


def waits_for_a_third_of_the_grace(patch: Patch) -> None:
    init = PairingQueues.__init__
    patch.setattr(
        PairingQueues, "__init__", lambda self, room_s, outage_s, waiting: init(self, room_s, outage_s / 3, waiting)
    )


redis_keeps_no_checkpoint = _replaced("RENEW", "if ARGV[i + 6] ~= ''", "if false")

_OLD_REPORT = "routers leave out a worker whose report is too old, so the list matters to nobody within a run"
_NO_SECOND_TOKEN = (
    "a second one comes only from a spare whose predecessor failed with its token taken; a scenario by hand finds it "
    "(`test_lost_sources`)"
)
_BY_HAND = "it makes a failover late and nothing wrong; scenarios written by hand find it (`test_lost_workers`)"
_TOO_LATE = "few reads outlive their lease; a scenario written by hand finds it (`test_late_reads`)"
_BOTH_GATEWAYS = (
    "of two gateways one must be away for long, in few seeds; a scenario by hand finds it (`test_planners`)"
)
_WATCHED = "routers go on with workers that they know; a scenario written by hand finds it (`test_found_in_redis`)"
_JOURNAL = (
    "a store must take no writes until after a gateway's death; a scenario by hand finds it (`test_killed_gateway`)"
)
_FORGOTTEN = "a prompt must be forgotten and then named; a scenario by hand finds it (`test_told_prompts`)"
_NEXT_STEP = "the next step notices it, a little later; a scenario by hand finds it (`test_lost_ranks`)"
_CHECKPOINT = "a gateway must die in a long stream; a scenario by hand finds it (`test_killed_gateway`)"
_BETWEEN = "a lease must end between confirmation and last byte; a scenario by hand finds it (`test_late_reads`)"
_LOST_AT_ONCE = "a failover must lose what was just settled; a scenario by hand finds it (`test_lost_settlements`)"
_MOVED = "a kept prompt must be moved and asked for again; a scenario by hand finds it (`test_host_tier`)"
_ONLY_SLOWER = "prompts are computed again, only later; a scenario by hand finds it (`test_lost_sources`)"
_UNKNOWN_BLOCKS = "routers then know fewer blocks, so prompts are slower (`test_routers_index`)"
_AT_A_LOSS = "a request must wait when ranks are lost; a scenario by hand finds it (`test_lost_ranks`)"

_OWN_SOCKETS = "an epoch's ranks have sockets of their own; what is late comes over links of hosts (`tests/unit/ranks`)"

_SILENT = "it makes a failover late; a scenario written by hand finds it (`test_lost_ranks`)"

MUTATIONS = [
    Mutation("bytes are used without asking whether the lease held", never_confirmed, unfound=_TOO_LATE),
    Mutation("the lease is confirmed before the read", confirmed_before_the_read, unfound=_BETWEEN),
    Mutation("a lease that has ended is confirmed", _ended_lease_confirmed, seed=27),
    Mutation("leased blocks are not held", _leased_blocks_not_held, seed=2),
    Mutation("a transfer hold ends with the request", _transfer_holds_end_with_the_request, seed=1),
    Mutation("leases do not expire", _leases_do_not_expire, seed=31),
    Mutation("an expired lease keeps its hold", _expired_lease_keeps_its_hold, seed=3),
    Mutation("a lease that was ended keeps its hold", _broken_prefill_keeps_its_lease, seed=0),
    Mutation("the salt is left out of the root hash", _salt_left_out, seed=1),
    Mutation("the cursor is one block too far after a failed fetch", _cursor_one_block_too_far, seed=10),
    Mutation("a failed fetch counts as whole", _failed_fetch_counts_as_whole, seed=1),
    Mutation("blocks are shared before their bytes have arrived", _block_counts_before_it_arrived, seed=14),
    Mutation("a settlement told again is a new charge", _retry_charges_again, seed=120),
    Mutation("a request is settled twice", _settled_twice, seed=1),
    Mutation("a store that failed over is not told again", lost_settlements_are_not_told_again, unfound=_LOST_AT_ONCE),
    Mutation("an abort is not settled", _aborts_are_not_billed, seed=1),
    Mutation("a failover begins anew", _failover_begins_anew, seed=12),
    Mutation("a failover repeats a token", _failover_repeats_a_token, seed=12),
    Mutation("tokens are dropped between worker and client", _tokens_are_dropped, seed=1),
    Mutation("silence is not noticed", silence_is_not_noticed, unfound=_BY_HAND),
    Mutation(
        "dead workers stay in the fleet",
        _dead_workers_stay_listed,
        unfound=_OLD_REPORT,
    ),
    Mutation("a block is freed with a reference left", _block_freed_with_a_reference_left, seed=0),
    Mutation("an evicted block stays findable", _evicted_block_stays_findable, seed=0),
    Mutation("a block is offered before it is full", _unfinished_block_offered, seed=16),
    Mutation(
        "the first token is taken again",
        first_token_taken_again,
        unfound=_NO_SECOND_TOKEN,
    ),
    Mutation("the engine is not told that no KV comes", _engine_not_told_that_no_kv_comes, seed=0),
    Mutation("a broken stream ends nobody's request", broken_stream_ends_nobody, unfound=_BY_HAND),
    Mutation("workers announce themselves once", _announced_once, seed=76),
    Mutation("what Redis lists ends by the clock of who wrote it", ends_by_own_clock, unfound=_WATCHED),
    Mutation("a Redis that is away is no error of ours", _lost_redis_is_a_bug, seed=2),
    Mutation("planners write without leading", _followers_write, seed=4),
    Mutation("a lease that is held is taken", _held_lease_taken, seed=4),
    Mutation("who has led once leads for ever", _leads_for_ever, seed=30),
    Mutation("pools shrink while a gateway is not seen", shrinks_blindly, unfound=_BOTH_GATEWAYS),
    Mutation("an API that does not answer ends the election", _lost_api_ends_the_election, seed=4),
    Mutation("an update of a request overtakes", _update_overtakes, seed=1),
    Mutation(
        "nobody asks whether a source lives",
        lost_source_still_used,
        unfound=_ONLY_SLOWER,
    ),
    Mutation("all choices have one seed", _seeds_of_choices_alike, seed=1),
    Mutation("the first choice alone is billed", _first_choice_is_billed, seed=1),
    Mutation("a store whose disk is full loses settlements", _full_store_loses_settlements, seed=37),
    Mutation("a gateway's full disk is a bug", _full_disk_is_a_bug, seed=60),
    Mutation("what a dead gateway left in its journal is not read", journal_is_not_read, unfound=_JOURNAL),
    Mutation("a neighbouring release is refused", _neighbours_are_refused, seed=141),
    Mutation("a report without what is newer is refused", _usage_is_required, seed=141),
    Mutation("blocks are dropped before the host tier has them", moved_blocks_are_not_copied, unfound=_MOVED),
    Mutation("blocks of the host tier are used before they are read", restored_blocks_are_not_copied, unfound=_MOVED),
    Mutation("pins do not end", _pins_do_not_end, seed=1),
    Mutation("Redis forgets what was settled", _replaced("SETTLE", "mark(charge, bill, '1')", ""), seed=10),
    Mutation("Redis keeps no checkpoint", redis_keeps_no_checkpoint, unfound=_CHECKPOINT),
    Mutation(
        "Redis keeps what a settlement held", _replaced("SETTLE", "reserved = let_go(charge)", "reserved = nil"), seed=3
    ),
    Mutation("ranks that are started anew begin with empty memory", _new_ranks_begin_with_empty_memory, seed=45),
    Mutation("ranks of a former epoch are left to themselves", _former_ranks_are_left, seed=79),
    Mutation("a step ends before all ranks have written", _step_ends_before_all_have_written, seed=39),
    Mutation("nobody hears that ranks were lost", nobody_hears_of_lost_ranks, unfound=_AT_A_LOSS),
    Mutation(
        "waiting requests do not hear that ranks were lost",
        waiting_requests_hear_nothing_of_lost_ranks,
        unfound=_AT_A_LOSS,
    ),
    Mutation("ranks that stand still are not noticed", silent_ranks_are_not_noticed, unfound=_SILENT),
    Mutation("a group without work is not watched", idle_group_is_not_watched, unfound=_NEXT_STEP),
    Mutation("the part of one rank counts for all", _one_ranks_part_counts_for_all, seed=15),
    Mutation("a worker that took no work is not asked again", refusing_worker_is_not_asked_again, seed=89),
    Mutation("requests wait for a third of the grace", waits_for_a_third_of_the_grace, seed=304),
    Mutation("a prompt that was forgotten counts as empty", forgotten_prompts_count_as_empty, unfound=_FORGOTTEN),
    Mutation("prompts share a token too many", _prompts_share_a_token_too_many, seed=49),
    Mutation("a router that began anew is not told all blocks", no_snapshot_for_a_new_router, unfound=_UNKNOWN_BLOCKS),
    Mutation("words of former epochs count", _words_of_former_epochs_count, unfound=_OWN_SOCKETS),
]
