"""A peer whose blocks this worker reads: its address, the transport's connection, and whether it is alive.

A source fails in two ways. `is_broken`: the peer is alive and can be called, but reading needs another connection.
`is_lost`: the peer does not answer, or this connection was closed. Invariant: once it is lost, its calls and reads fail
at once, so nothing waits for a process that died or was stopped.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial

from tandem.core.clock import Clock
from tandem.core.errors import TandemError, TransportError, WorkerStoppedError
from tandem.rpc.client import WorkerClient
from tandem.rpc.messages import LinkReport, WorkerAddress
from tandem.transport.base import KVTransport, Peer
from tandem.transport.reshard import Entry, Pages, RankedRead, Resharding
from tandem.transport.transfer import Transfer

PING_INTERVAL_S = 0.5  # between two probes of a peer in use
PING_TIMEOUT_S = 1.5  # for its answer; then it is lost

logger = logging.getLogger(__name__)


class KVSource:
    """A connection to one incarnation of a peer. While in use, the peer is probed twice a second, which also renews its
    leases.

    Args:
        resharding: from the peer's ranks to this worker's.
    """

    def __init__(
        self, worker: WorkerAddress, client: WorkerClient, transport: KVTransport, peer: Peer, resharding: Resharding
    ) -> None:
        self.worker = worker
        self.client = client
        self.transport = transport
        self.peer = peer
        self.resharding = resharding
        self.link: LinkReport | None = None
        self.is_lost = False
        self.is_broken = False
        self._leases: set[str] = set()
        self._num_users = 0
        self._pings: asyncio.Task[None] | None = None
        self._releases: set[asyncio.Task[None]] = set()

    @property
    def is_readable(self) -> bool:
        """Whether the peer is alive and its blocks can be read on this connection."""
        return not (self.is_lost or self.is_broken)

    @property
    def is_used(self) -> bool:
        return self._num_users > 0

    @asynccontextmanager
    async def in_use(self) -> AsyncIterator[None]:
        """Probes the peer for the time of the block."""
        self._num_users += 1
        if self._pings is None:
            self._pings = asyncio.create_task(self._ping(), name=f"pings of {self.worker.worker_id}")
        try:
            yield
        finally:
            self._num_users -= 1
            if self._num_users == 0 and self._pings is not None:
                pings, self._pings = self._pings, None
                if not self.is_lost:  # NOTE: else they are disconnecting, which is waited for
                    pings.cancel()
                await asyncio.gather(pings, return_exceptions=True)

    def read(
        self, entries: Sequence[Entry], remote_blocks: Sequence[Pages], local_blocks: Sequence[Pages], clock: Clock
    ) -> Transfer:
        """Begins to read blocks on all ranks; they arrive or fail together. `remote_blocks`, `local_blocks`: pages of
        each entry there and here. Raises `TransportError` or `CapacityError` if nothing could be begun.

        A connection that refused a read is not used again, since it would refuse others.
        """
        try:
            parts = self.resharding.reads(entries, remote_blocks, local_blocks)
        except TransportError:
            self.is_broken = True
            raise
        return Transfer.begun([partial(self._begin, part) for part in parts], clock)

    def _begin(self, part: RankedRead) -> Transfer:
        try:
            return self.transport.read(self.peer, part.remote, part.local)
        except TransportError:
            self.is_broken = True
            raise

    def read_pages(self, remote: Sequence[int], local: Sequence[int]) -> Transfer:
        """Begins to read whole pages of all ranks; raises `TransportError` if that is refused."""
        part = self.resharding.read_of_pages(remote, local)
        return self.transport.read(self.peer, part.remote, part.local)

    def keep(self, lease_id: str) -> None:
        """Renews a lease with each probe from now on, until `release` or until the peer says that it has ended."""
        self._leases.add(lease_id)

    def release(self, lease_id: str) -> None:
        """Ends a lease without waiting for the answer; if the call is lost, the lease expires."""
        self._leases.discard(lease_id)
        if not self.is_lost:
            task = asyncio.create_task(self._release(lease_id))
            self._releases.add(task)
            task.add_done_callback(self._releases.discard)

    async def lose(self) -> None:
        """Declares the peer lost: everything that waits for it fails."""
        if self.is_lost:
            return
        self.is_lost = True
        await asyncio.gather(self.client.close(), asyncio.to_thread(self.transport.disconnect, self.peer))

    async def close(self) -> None:
        """Declares the peer lost and waits for everything begun on its behalf."""
        if self._releases:
            await asyncio.wait(self._releases, timeout=PING_TIMEOUT_S)
        await self.lose()
        tasks = [task for task in (*self._releases, self._pings) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _ping(self) -> None:
        while True:
            await asyncio.sleep(PING_INTERVAL_S)
            try:
                invalid = await self.client.renew(sorted(self._leases), timeout_s=PING_TIMEOUT_S)
            except TandemError as error:
                level = logging.INFO if isinstance(error, WorkerStoppedError) else logging.WARNING
                logger.log(level, "no more KV blocks from worker %s: %s", self.worker.worker_id, error)
                await asyncio.shield(self.lose())
                return
            self._leases.difference_update(invalid)

    async def _release(self, lease_id: str) -> None:
        with suppress(TandemError):
            await self.client.release([lease_id], timeout_s=PING_TIMEOUT_S)
