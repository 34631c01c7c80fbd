"""A peer whose blocks this worker can read: its address, the connection of a transport, and whether it still lives.

`is_broken`: it lives and can be asked, but another connection is needed to read.

Invariant: once `is_lost`, its calls and reads fail at once, so nobody waits for a process that died or was stopped.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

from tandem.core.errors import TandemError, TransportError, WorkerStoppedError
from tandem.rpc.client import WorkerClient
from tandem.rpc.messages import LinkReport, WorkerAddress
from tandem.transport.base import KVTransport, Peer
from tandem.transport.transfer import Transfer

PING_INTERVAL_S = 0.5
PING_TIMEOUT_S = 1.5

logger = logging.getLogger(__name__)


class KVSource:
    """A connection to one incarnation of a peer. While somebody uses it, it is asked twice a second whether it lives,
    which also renews the leases it gave us.
    """

    def __init__(self, worker: WorkerAddress, client: WorkerClient, transport: KVTransport, peer: Peer) -> None:
        self.worker = worker
        self.client = client
        self.transport = transport
        self.peer = peer
        self.link: LinkReport | None = None
        self.is_lost = False
        self.is_broken = False
        self._leases: set[str] = set()
        self._num_users = 0
        self._pings: asyncio.Task[None] | None = None
        self._releases: set[asyncio.Task[None]] = set()

    @property
    def is_readable(self) -> bool:
        return not (self.is_lost or self.is_broken)

    @property
    def is_used(self) -> bool:
        return self._num_users > 0

    @asynccontextmanager
    async def in_use(self) -> AsyncIterator[None]:
        """Keep asking whether it lives."""
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

    def read(self, remote_blocks: Sequence[int], local_blocks: Sequence[int]) -> Transfer:
        """As the transport's. A connection that refuses a read is done with: it would refuse others too."""
        try:
            return self.transport.read(self.peer, remote_blocks, local_blocks)
        except TransportError:
            self.is_broken = True
            raise

    def keep(self, lease_id: str) -> None:
        """Renew a lease from now on."""
        self._leases.add(lease_id)

    def release(self, lease_id: str) -> None:
        """End a lease, without waiting for the answer: one that gets lost ends by its time."""
        self._leases.discard(lease_id)
        if not self.is_lost:
            task = asyncio.create_task(self._release(lease_id))
            self._releases.add(task)
            task.add_done_callback(self._releases.discard)

    async def lose(self) -> None:
        """Give it up: everything that waits for it fails."""
        if self.is_lost:
            return
        self.is_lost = True
        await asyncio.gather(self.client.close(), asyncio.to_thread(self.transport.disconnect, self.peer))

    async def close(self) -> None:
        """Lose it and wait for everything begun on its behalf."""
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
