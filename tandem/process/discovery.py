"""Discovery of workers: workers announce themselves every second, and routers read the list of announced workers.

Does not connect to workers. Invariant: a record that is not announced again expires after `TTL_S`, so dead workers need
no cleaning up. A listed worker may be dead; `fleet_watch` determines whether it is alive.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tandem.core.clock import Clock, SystemClock
from tandem.core.errors import CapacityError, InvalidRequestError, LocalityUnavailableError, TandemError, shown
from tandem.core.machine import random_fraction
from tandem.routing.snapshot import Role
from tandem.rpc.client import RouterClient
from tandem.rpc.credentials import Credentials
from tandem.rpc.messages import Registration, WorkerAddress, WorkerRecord

TTL_S = 3.0  # for which an announcement counts
ANNOUNCE_INTERVAL_S = 1.0  # between two announcements of a worker
MAX_WORKERS = 16_384  # in one registry
_SQUARE_S = 1e-4  # mean interval between two reads of the list, divided by the square of the number of workers
_MAX_CHARACTERS = 512  # of a text in a record
_ROUTER_TIMEOUT_S = 1.0


class Discovery(Protocol):
    """Registry of workers by id, in which they are announced and found. Of two incarnations of a worker that announce
    at once the one of the later epoch is kept, and the other only once that one has expired.

    An implementation outside this process raises `LocalityUnavailableError` from `announce`, `withdraw` and `workers`
    if it cannot be reached; the caller retries later.
    """

    async def announce(self, record: WorkerRecord) -> None:
        """Announce a worker as alive; to be repeated every `ANNOUNCE_INTERVAL_S`."""
        ...

    async def withdraw(self, record: WorkerRecord) -> None:
        """Remove a record at once, unless it is of a later incarnation."""
        ...

    async def workers(self) -> Sequence[WorkerRecord]:
        """Returns the workers announced during the last `TTL_S`. A long list is costly: see `list_interval_s`."""
        ...

    async def close(self) -> None:
        """Drop the connections."""
        ...


def list_interval_s(num_workers: int) -> float:
    """Returns the random interval between two reads of the list by the same worker, in seconds.

    Each of n workers reads n entries, 4 us apiece in Redis. The interval grows so that all workers together use 4 % of
    its core, however many they are; from 100 workers on it is more than a second.
    """
    return _SQUARE_S * num_workers**2 * (0.5 + random_fraction())  # NOTE: those who began together do not stay together


class EmbeddedDiscovery:
    """`Discovery` in this process: a router's own registry, filled by `RouterHandler.register`.

    Raises (from `announce`):
        InvalidRequestError: the record cannot be a worker's.
        CapacityError: `max_workers` others are listed.
    """

    def __init__(self, clock: Clock | None = None, ttl_s: float = TTL_S, max_workers: int = MAX_WORKERS) -> None:
        self._clock = clock or SystemClock()
        self._ttl_s = ttl_s
        self._max_workers = max_workers
        self._records: dict[str, tuple[float, WorkerRecord]] = {}

    async def announce(self, record: WorkerRecord) -> None:
        check_record(record)
        if record.worker.worker_id not in self._records and len(self._records) >= self._max_workers:
            self._expire()
            if len(self._records) >= self._max_workers:
                raise CapacityError(f"{self._max_workers} workers are registered, which is all this router keeps")
        now_s = self._clock.now_s()
        until_s, known = self._records.get(record.worker.worker_id, (now_s, record))
        if until_s <= now_s or _replaces(record, known):
            self._records[record.worker.worker_id] = (now_s + self._ttl_s, record)

    async def withdraw(self, record: WorkerRecord) -> None:
        _, known = self._records.get(record.worker.worker_id, (0.0, None))
        if known is not None and known.worker == record.worker:
            del self._records[record.worker.worker_id]

    async def workers(self) -> Sequence[WorkerRecord]:
        self._expire()
        return [record for _, record in self._records.values()]

    async def close(self) -> None:
        self._records.clear()

    def _expire(self) -> None:
        now_s = self._clock.now_s()
        for worker_id in [name for name, (until_s, _) in self._records.items() if until_s <= now_s]:
            del self._records[worker_id]


@dataclass(frozen=True, slots=True)
class _RouterAnswer:
    """Workers by id, as a router listed them at `at_s`; they count until `until_s`."""

    at_s: float = 0.0
    until_s: float = 0.0
    records: dict[str, WorkerRecord] = field(default_factory=dict)


class RouterDiscovery:
    """`Discovery` for workers of a deployment without Redis: announces to every router.

    Returns the lists that routers sent last, requested at `list_interval_s`, plus the announcements since then; where
    they differ about a worker, the later epoch counts, then the newest list. One router that answers is enough; the
    others receive the announcement when they are back.
    """

    def __init__(
        self,
        routers: Sequence[str],
        credentials: Credentials,
        *,
        clock: Clock | None = None,
        ttl_s: float = TTL_S,
        timeout_s: float = _ROUTER_TIMEOUT_S,
    ) -> None:
        if not routers:
            raise InvalidRequestError("no router is named; give one host:port or more")
        self._clients = [RouterClient(address, credentials) for address in dict.fromkeys(routers)]
        self._clock = clock or SystemClock()
        self._ttl_s = ttl_s
        self._timeout_s = timeout_s
        self._answers = [_RouterAnswer() for _ in self._clients]
        self._ask_at_s = [0.0] * len(self._clients)

    async def announce(self, record: WorkerRecord) -> None:
        check_record(record)
        results = await asyncio.gather(*(self._register(number, record) for number in range(len(self._clients))))
        self._require_one(results)
        for answer in self._answers:  # NOTE: also of routers that did not answer: theirs is an older incarnation
            answer.records[record.worker.worker_id] = record

    async def withdraw(self, record: WorkerRecord) -> None:
        for answer in self._answers:
            known = answer.records.get(record.worker.worker_id)
            if known is not None and known.worker == record.worker:
                del answer.records[record.worker.worker_id]
        results = await asyncio.gather(*(self._unregister(client, record) for client in self._clients))
        self._require_one(results)

    async def workers(self) -> Sequence[WorkerRecord]:
        now_s = self._clock.now_s()
        fresh = sorted((answer for answer in self._answers if answer.until_s > now_s), key=lambda answer: answer.at_s)
        found: dict[str, WorkerRecord] = {}
        for worker_id, record in (known for answer in fresh for known in answer.records.items()):
            if worker_id not in found or _replaces(record, found[worker_id]):
                found[worker_id] = record
        return list(found.values())

    async def close(self) -> None:
        await asyncio.gather(*(client.close() for client in self._clients))

    async def _register(self, number: int, record: WorkerRecord) -> TandemError | None:
        is_asking = self._clock.now_s() >= self._ask_at_s[number]
        try:
            registration = Registration(record, without_records=not is_asking)
            records = await self._clients[number].register(registration, timeout_s=self._timeout_s)
        except TandemError as error:
            return error
        if is_asking:
            now_s, interval_s = self._clock.now_s(), list_interval_s(len(records))
            until_s = now_s + max(self._ttl_s, 2 * interval_s)
            self._answers[number] = _RouterAnswer(now_s, until_s, {known.worker.worker_id: known for known in records})
            self._ask_at_s[number] = now_s + interval_s
        return None

    async def _unregister(self, client: RouterClient, record: WorkerRecord) -> TandemError | None:
        try:
            await client.unregister(record, timeout_s=self._timeout_s)
        except TandemError as error:
            return error
        return None

    def _require_one(self, results: Sequence[TandemError | None]) -> None:
        if None not in results:
            raise LocalityUnavailableError(f"no router answers: {results[0]}") from results[0]


class StaticDiscovery:
    """`Discovery` of fixed addresses. The worker that answers at an address reports its own id."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._records = [
            WorkerRecord(WorkerAddress("", address), role="", model="", pool="") for address in dict.fromkeys(addresses)
        ]

    async def announce(self, record: WorkerRecord) -> None:
        """Nothing to do: its address is known."""

    async def withdraw(self, record: WorkerRecord) -> None:
        """Nothing to do: its address stays known."""

    async def workers(self) -> Sequence[WorkerRecord]:
        return list(self._records)

    async def close(self) -> None:
        """Nothing is open."""


def _replaces(record: WorkerRecord, known: WorkerRecord) -> bool:
    """Whether a record replaces an earlier one of the same worker. NOTE: one of the release before, without an epoch,
    always does.
    """
    return not record.epoch or known.epoch <= record.epoch


def check_record(record: WorkerRecord) -> None:
    """Raises InvalidRequestError for a record that cannot be a worker's.

    Raises:
        InvalidRequestError: naming the field.
    """
    worker = record.worker
    texts = {
        "worker_id": worker.worker_id,
        "address": worker.address,
        "incarnation": worker.incarnation,
        "role": record.role,
        "model": record.model,
        "pool": record.pool,
    }
    for name, text in texts.items():
        if len(text) > _MAX_CHARACTERS:
            raise InvalidRequestError(f"{name}={shown(text)} is too long; use at most {_MAX_CHARACTERS} characters")
    if not worker.worker_id:
        raise InvalidRequestError("worker_id is empty; name the worker that registers")
    host, _, port = worker.address.rpartition(":")
    if not host or not (port.isdecimal() and 0 < int(port) < 65_536):
        raise InvalidRequestError(f"address={shown(worker.address)} cannot be called; write host:port")
    if not 0 <= record.epoch < 1 << 64:
        raise InvalidRequestError(f"epoch={shown(record.epoch)} is out of range; use 0 to 2**64 - 1")
    if record.role not in set(Role):
        raise InvalidRequestError(f"role={shown(record.role)} is no role; use one of {', '.join(Role)}")
