"""Fetches the cached prefix of a prompt from the host tier or from a peer, instead of computing it.

After any failure the engine computes the rest: it is told exactly once that no more KV will come.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

from tandem.core.errors import TandemError, TransportError
from tandem.core.machine import random_id
from tandem.core.timeline import Stage
from tandem.rpc.messages import LeaseCall, WorkerAddress
from tandem.scheduler.output import KVReserved
from tandem.worker.core import WorkerCore
from tandem.worker.fetch import Fetch
from tandem.worker.source import KVSource
from tandem.worker.sources import Sources

LEASE_TIMEOUT_S = 3.0  # for a peer's answer to the request for a lease

logger = logging.getLogger(__name__)


class PrefixFetch:
    """Fetches the blocks of a chain of hashes for one request into the blocks that the engine has reserved."""

    def __init__(self, core: WorkerCore, sources: Sources, reserved: KVReserved, timeline: list[Stage]) -> None:
        self._core = core
        self._sources = sources
        self._engine_id = reserved.request_id
        self._fetch = Fetch(core, reserved, timeline)

    @property
    def num_arrived_tokens(self) -> int:
        """Leading tokens whose KV did not have to be computed."""
        return self._fetch.num_arrived_tokens

    def start(
        self, holder: WorkerAddress | None, hashes: Callable[[], Awaitable[Sequence[bytes]]]
    ) -> "asyncio.Task[None]":
        """Fills the reservation from the host tier, then from `holder`. The engine continues even if both fail."""
        task = asyncio.create_task(self._run(holder, hashes))
        task.add_done_callback(self._finish)  # NOTE: also comes when the task was cancelled before it could begin
        return task

    def _finish(self, _: object) -> None:
        self._fetch.close()
        self._core.engine.note_kv_ended(self._engine_id, self._fetch.num_arrived_tokens)

    async def _run(self, holder: WorkerAddress | None, hashes: Callable[[], Awaitable[Sequence[bytes]]]) -> None:
        if self._fetch.is_complete:
            return
        chain = tuple(await hashes())
        try:
            if self._core.host is not None and self._core.host.has_moved:
                await self._fetch.restore(self._core.host, chain)
            if holder is not None and not self._fetch.is_complete:
                source = await self._sources.connect(holder)
                async with source.in_use():
                    await self._get_from(source, chain)
        except TandemError as error:
            peer = "the host tier" if holder is None else f"worker {holder.worker_id}"
            logger.info("request %s: no prefix from %s: %s", self._engine_id, peer, error)

    async def _get_from(self, source: KVSource, hashes: tuple[bytes, ...]) -> None:
        lease_id = random_id()
        call = LeaseCall(reader=self._core.me, lease_id=lease_id, block_hashes=hashes)
        source.keep(lease_id)
        try:
            lease = await source.client.lease(call, timeout_s=LEASE_TIMEOUT_S)
            if lease.num_tokens == 0:
                raise TransportError(f"worker {source.worker.worker_id} does not hold the prefix (any more)")
            source.keep(lease_id)  # NOTE: again: a probe that overtook the call learned that there was no such lease
            await self._fetch.pull(source, lease)
        finally:
            source.release(lease_id)
