"""Connections to the workers that KV is read from, one for each of their process starts (incarnations).

Invariant: a peer whose blocks would mean something else is never connected; both sides' values are in the error.
"""

import asyncio
import hashlib
import heapq
import logging
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from itertools import count

from tandem.core.errors import (
    AnotherIncarnationError,
    IncompatiblePeerError,
    TandemError,
    TransportError,
    WorkerLostError,
    shown,
)
from tandem.rpc.client import WorkerClient, client_of
from tandem.rpc.messages import Greeting, LinkReport, WorkerAddress
from tandem.rpc.prompt_reuse import ReusablePrompts
from tandem.rpc.protocols import PROTOCOL_VERSION
from tandem.transport.base import KVTransport, Peer
from tandem.transport.choose import AUTO, Site, TransportChoice, choose
from tandem.transport.measure import measure_link
from tandem.transport.reshard import Resharding
from tandem.worker.core import WorkerCore
from tandem.worker.source import KVSource
from tandem.worker.transfer_hold import TransferHold

GREETING_TIMEOUT_S = 2.0  # for a peer's answer to the handshake
FORGET_AFTER_S = 300.0  # of not being listed nor used; discovery may be away for a while
MEASURED_BYTES = 8 << 20  # read to measure a link
MEASURED_SHARE = 8  # a measurement reads at most one of so many blocks of the pool
MAX_MET = 64  # peers connected before they are needed, and links reported
MAX_UNREACHABLE = 256  # peers reported as unreachable
MAX_PAUSE_S = 60.0  # between two attempts to connect

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Refusal:
    """Reason why a peer could not be connected, and time of the next try. `is_there`: another incarnation answered."""

    worker: WorkerAddress
    words: str
    is_there: bool
    pause_s: float
    until_s: float


class Sources:
    """All peers from which this worker reads. In a large fleet some are connected in advance, others when needed."""

    def __init__(self, core: WorkerCore) -> None:
        self._core = core
        self._sources: dict[str, KVSource] = {}
        self._unlisted_s: dict[str, float] = {}
        self._connecting: dict[WorkerAddress, asyncio.Task[KVSource]] = {}
        self._refusals: dict[str, _Refusal] = {}
        self._numbers = count(1)
        self._prompts = ReusablePrompts()  # sent to prefill workers

    @property
    def links(self) -> tuple[LinkReport, ...]:
        """Measured links of the `MAX_MET` most recently connected peers that can be read from."""
        sources = self._sources.values()
        found = [source.link for source in sources if source.link is not None and source.is_readable]
        return tuple(found[-MAX_MET:])

    @property
    def unreachable(self) -> tuple[str, ...]:
        """Ids of peers that were lost or could not be connected and still are not; at most `MAX_UNREACHABLE`."""
        found = {worker_id for worker_id, source in self._sources.items() if source.is_lost}
        found.update(worker_id for worker_id, refusal in self._refusals.items() if not refusal.is_there)
        return tuple(sorted(found)[:MAX_UNREACHABLE])

    async def connect(self, worker: WorkerAddress) -> KVSource:
        """The connection to this incarnation, created if needed.

        Raises:
            WorkerLostError: it does not answer; another worker or incarnation answers; or it could not be connected
                just now and is retried later.
            UntrustedPeerError: the answering process states another address as its own.
            IncompatiblePeerError: its blocks are not compatible.
            TransportError: its blocks cannot be reached.
            ConfigurationError: no transport can serve this pair.
        """
        known = self._sources.get(worker.worker_id)
        if known is not None and known.is_readable and worker.incarnation in ("", known.worker.incarnation):
            self._unlisted_s.pop(worker.worker_id, None)  # NOTE: every use begins here
            self._refusals.pop(worker.worker_id, None)
            return known
        task = self._connecting.get(worker)
        if task is None:
            self._require_due(worker)
            task = self._connecting[worker] = asyncio.create_task(self._connect(worker))
            task.add_done_callback(lambda _: self._connecting.pop(worker, None))
        return await asyncio.shield(task)

    async def meet(self, workers: Sequence[WorkerAddress]) -> None:
        """Connects to new workers, so that links are measured before they are needed, and forgets those that left.

        At most `MAX_MET` are connected, a different selection for each worker. Unreadable peers are retried at growing
        intervals, however many there are: routers do not pair them until then.
        """
        listed = {worker.worker_id for worker in workers}
        await self._forget(listed)
        now_s = self._core.clock.now_s()
        self._refusals = {k: refusal for k, refusal in self._refusals.items() if k in listed or now_s < refusal.until_s}
        others = [worker for worker in workers if worker.worker_id != self._core.me.worker_id]
        unreachable = set(self.unreachable)
        met = heapq.nsmallest(MAX_MET, others, key=self._rank)
        for worker in dict.fromkeys([*met, *(other for other in others if other.worker_id in unreachable)]):
            with suppress(TandemError):
                await self.connect(worker)

    def _rank(self, worker: WorkerAddress) -> bytes:
        return hashlib.sha256(f"{self._core.me.worker_id} {worker.worker_id}".encode()).digest()

    def _require_due(self, worker: WorkerAddress) -> None:
        """Raises WorkerLostError for a peer that could not be connected just now, since each try may take seconds."""
        refusal = self._refusals.get(worker.worker_id)
        if refusal is None or refusal.worker != worker:
            return
        wait_s = refusal.until_s - self._core.clock.now_s()
        if wait_s > 0:
            raise WorkerLostError(f"worker {worker.worker_id} is tried again in {wait_s:.1f} s: {refusal.words}")

    def _refuse(self, worker: WorkerAddress, words: str, is_there: bool) -> None:
        """Logs a persistent reason once."""
        former = self._refusals.get(worker.worker_id)
        if former is not None and former.worker != worker:
            former = None
        is_known = former is not None and former.words == words
        pause_s = min(MAX_PAUSE_S, 2 * former.pause_s) if former is not None else 1.0
        until_s = self._core.clock.now_s() + pause_s
        self._refusals[worker.worker_id] = _Refusal(worker, words, is_there, pause_s, until_s)
        level = logging.DEBUG if is_known else logging.WARNING
        logger.log(level, "worker %s at %s cannot be read from: %s", worker.worker_id, worker.address, words)

    async def close(self) -> None:
        tasks = list(self._connecting.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(source.close() for source in self._sources.values()))

    async def _forget(self, listed: Set[str]) -> None:
        """Closes connections to workers that are not listed: at once if lost, else when unused for long."""
        now_s, gone = self._core.clock.now_s(), list[KVSource]()
        for worker_id, source in list(self._sources.items()):
            since_s = self._unlisted_s.setdefault(worker_id, now_s)
            if source.is_lost and worker_id not in listed:
                gone.append(self._sources.pop(worker_id))
            elif source.is_used or worker_id in listed:
                del self._unlisted_s[worker_id]
            elif now_s - since_s >= FORGET_AFTER_S:
                gone.append(self._sources.pop(worker_id))
        self._unlisted_s = {key: since_s for key, since_s in self._unlisted_s.items() if key in self._sources}
        await asyncio.gather(*(source.close() for source in gone))

    async def _connect(self, worker: WorkerAddress) -> KVSource:
        try:
            source = await self._connected(worker)
        except TandemError as error:
            self._refuse(worker, str(error), isinstance(error, AnotherIncarnationError))
            raise
        self._refusals.pop(worker.worker_id, None)
        return source

    async def _connected(self, worker: WorkerAddress) -> KVSource:
        client = client_of(
            worker, self._core.credentials, metadata_source=self._core.tracing.metadata, prompts=self._prompts
        )
        try:
            theirs = await client.greet(await asyncio.to_thread(self._greeting), timeout_s=GREETING_TIMEOUT_S)
            self._check(worker, theirs)
            source = await self._open(client, theirs)
        except BaseException:  # NOTE: cancelled too, the client must be closed
            await client.close()
            raise
        former = self._sources.pop(theirs.worker.worker_id, None)
        self._sources[theirs.worker.worker_id] = source
        if former is not None:
            await former.close()
        return source

    def _greeting(self) -> Greeting:
        return self._core.greeting(PROTOCOL_VERSION)

    def _check(self, worker: WorkerAddress, theirs: Greeting) -> None:
        if worker.worker_id not in ("", theirs.worker.worker_id):
            raise AnotherIncarnationError(
                f"worker {shown(theirs.worker.worker_id)} is at {worker.address} now, not {worker.worker_id}"
            )
        if worker.incarnation not in ("", theirs.worker.incarnation):
            raise AnotherIncarnationError(
                f"worker {worker.worker_id} at {worker.address} is incarnation {theirs.worker.incarnation} now, "
                f"not {worker.incarnation}"
            )
        check_compatible(self._core.compatibility, theirs)

    async def _open(self, client: WorkerClient, theirs: Greeting) -> KVSource:
        """Connects by the chosen transport; by tcp if the transport was chosen automatically and fails."""
        site = Site.from_fields(theirs.site)
        choice = choose(self._core.site, site, self._core.transports.wanted, theirs.cards)
        try:
            transport, peer = await self._reach(choice, theirs)
        except TransportError as error:
            if choice.name == "tcp" or self._core.transports.wanted != AUTO or "tcp" not in theirs.cards:
                raise
            logger.warning("%s does not reach worker %s, tcp is used: %s", choice.name, theirs.worker.worker_id, error)
            choice = choose(self._core.site, site, "tcp")
            transport, peer = await self._reach(choice, theirs)
        logger.info("worker %s is read by %s (%s)", theirs.worker.worker_id, choice.path, choice.reason)
        try:
            resharding = Resharding(self._core.ranked, self._core.num_blocks, peer)
            source = KVSource(theirs.worker, client, transport, peer, resharding)
            await self._measure(source, choice)
        except BaseException:  # NOTE: cancelled too, its threads and sockets must go
            await asyncio.to_thread(transport.disconnect, peer)
            raise
        return source

    async def _reach(self, choice: TransportChoice, theirs: Greeting) -> tuple[KVTransport, Peer]:
        transport = self._core.transports.get(choice.name)
        card = theirs.cards.get(choice.name)
        if card is None:
            raise TransportError(
                f"worker {theirs.worker.worker_id} has not opened {choice.name}, chosen for: {choice.reason}"
            )
        return transport, await asyncio.to_thread(transport.connect, card)

    async def _measure(self, source: KVSource, choice: TransportChoice) -> None:
        """Times a few reads into borrowed blocks; skipped if none are free."""
        name = f"measuring {source.worker.worker_id} {next(self._numbers)}"
        most = -(-self._core.num_blocks // MEASURED_SHARE)  # NOTE: or a small pool would look full to routers meanwhile
        wanted = min(-(-MEASURED_BYTES // self._core.block_bytes), source.resharding.num_remote_blocks - 1, most)
        hold = TransferHold(self._core.engine, name)
        try:
            lent = await self._core.engine.call(lambda engine: engine.kv.borrow(name, wanted))
            if reads := source.resharding.reads_of_any(lent):
                first, *_ = reads
                report = await asyncio.to_thread(
                    measure_link,
                    source.transport,
                    source.peer,
                    first.remote,
                    first.local,
                    choice.path,
                    on_transfer=hold.add,
                )
                source.link = LinkReport(
                    source_id=source.worker.worker_id,
                    transport=choice.name,
                    path=str(choice.path),
                    bytes_per_s=report.gb_per_s * 1e9,
                    latency_s=report.latency_s,
                    is_slow=report.is_slow,
                )
        finally:
            hold.close()


def check_compatible(ours: Mapping[str, str], theirs: Greeting) -> None:
    """Raises `IncompatiblePeerError` for a peer whose blocks are not compatible, naming every difference with both
    sides' values.
    """
    mismatches = [
        f"{name}: peer {theirs.compatibility.get(name, '(absent)')!r}, here {ours.get(name, '(absent)')!r}"
        for name in sorted({*ours, *theirs.compatibility})
        if ours.get(name) != theirs.compatibility.get(name)
    ]
    if mismatches:
        raise IncompatiblePeerError(f"worker {theirs.worker.worker_id} cannot share blocks: {'; '.join(mismatches)}")
