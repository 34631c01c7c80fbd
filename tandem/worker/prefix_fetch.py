"""The prefill side's shortcut: takes a prefix from the peer that holds it instead of computing it.

Whatever goes wrong costs a recompute: the engine hears exactly once that no more KV will come.
"""

import asyncio
import logging
import uuid
from collections.abc import Sequence

from tandem.core.errors import TandemError, TransportError
from tandem.core.timeline import Stage
from tandem.rpc.messages import LeaseCall, WorkerAddress
from tandem.scheduler.output import KVReserved
from tandem.worker.core import WorkerCore
from tandem.worker.fetch import Fetch
from tandem.worker.source import Source
from tandem.worker.sources import Sources

LEASE_TIMEOUT_S = 3.0

logger = logging.getLogger(__name__)


class PrefixFetch:
    """Gets the blocks of a chain of hashes for one request."""

    def __init__(
        self, core: WorkerCore, sources: Sources, engine_id: str, hashes: Sequence[bytes], timeline: list[Stage]
    ) -> None:
        self._core = core
        self._sources = sources
        self._engine_id = engine_id
        self._hashes = tuple(hashes)
        self._timeline = timeline

    async def run(self, holder: WorkerAddress, reserved: KVReserved) -> None:
        """Fill the reservation from `holder`, or give up; either way the engine goes on."""
        fetch = Fetch(self._core, reserved, self._timeline)
        try:
            source = await self._sources.connect(holder)
            async with source.in_use():
                await self._get_from(source, fetch)
        except TandemError as error:
            logger.warning("request %s: no prefix from worker %s: %s", self._engine_id, holder.worker_id, error)
        finally:
            fetch.close()
            self._core.engine.kv_arrived(self._engine_id, fetch.num_arrived_tokens)

    async def _get_from(self, source: Source, fetch: Fetch) -> None:
        lease_id = uuid.uuid4().hex
        call = LeaseCall(reader=self._core.me, lease_id=lease_id, block_hashes=self._hashes)
        source.keep(lease_id)
        try:
            lease = await source.client.lease(call, timeout_s=LEASE_TIMEOUT_S)
            if lease.num_tokens == 0:
                raise TransportError(f"worker {source.worker.worker_id} does not hold the prefix (any more)")
            await fetch.pull(source, lease)
        finally:
            source.release(lease_id)


async def ended(task: "asyncio.Task[None] | None") -> None:
    """Cancel a task if it still runs, and wait for it."""
    if task is not None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
