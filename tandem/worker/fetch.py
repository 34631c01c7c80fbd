"""Fills the blocks reserved for one request from the host tier and from leased blocks of peers, and counts usable
tokens.

Invariant: a block counts only after its bytes have arrived, the sampled checksums agree, and the source has confirmed
that the lease was valid throughout. The reservation (`KVReserved`: blocks that the engine keeps for the request's KV)
is held until every read is over, whatever its outcome. `prefix_fetch` and `remote_prefill` decide what is read.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence

from tandem.core.errors import TandemError, TransportError
from tandem.core.machine import wall_s
from tandem.core.timeline import Stage
from tandem.kvcache.block_table import BlockRange
from tandem.rpc.messages import LeaseUpdate
from tandem.scheduler.output import KVReserved
from tandem.transport.reshard import Entry, Pages
from tandem.transport.transfer import Transfer
from tandem.worker.confirm import called_back, confirm, succeeded
from tandem.worker.core import WorkerCore
from tandem.worker.host_tier import HostCopier
from tandem.worker.source import KVSource
from tandem.worker.transfer_hold import TransferHold

FORMER_OVER_S = 1.0  # for which a read waits for an earlier one into the same blocks
_CUT_WITHIN_S = 1.0  # a read that fails later is not repeated: it was slow, and would be again
logger = logging.getLogger(__name__)


class Fetch:
    """Transfers into one reservation. Several pulls may run at once, from one source or, after a failure, another.

    Args:
        timeline: receives a stage for each transfer.
    """

    def __init__(self, core: WorkerCore, reserved: KVReserved, timeline: list[Stage]) -> None:
        self._core = core
        self._reserved = reserved
        self._timeline = timeline
        self._wanted = _entries(reserved.groups)
        self._claimed: set[Entry] = set()
        self._writers: dict[Entry, Transfer] = {}
        self._hold = TransferHold(core.engine, reserved.fetch_id)

    @property
    def num_arrived_tokens(self) -> int:
        """Leading tokens whose KV may be used."""
        missing = min((index for _, index in self._wanted), default=None)
        if missing is None:
            return self._reserved.num_expected_tokens
        return max(self._reserved.num_held_tokens, missing * self._core.block_size)

    @property
    def is_complete(self) -> bool:
        """Whether all blocks of the reservation have arrived."""
        return not self._wanted

    async def pull(self, source: KVSource, lease: LeaseUpdate) -> None:
        """Reads the missing blocks from these leased ones.

        Raises:
            TransportError: the bytes did not arrive, even after a retry where that may help; they differ; or the lease
                ended meanwhile. None of them count.
            TandemError: the source could not be called.
        """
        offered = _entries(lease.groups)
        if any(index * self._core.block_size >= lease.num_tokens for _, index in offered):
            raise TransportError(f"lease {lease.lease_id} names blocks beyond its {lease.num_tokens} tokens")
        entries = sorted(entry for entry in offered if entry in self._wanted and entry not in self._claimed)
        if not entries:
            return
        self._claimed.update(entries)  # NOTE: a block may be offered twice; a second read could undo a confirmed one
        try:
            await self._read(source, lease.lease_id, entries, offered)
        finally:
            self._claimed.difference_update(entries)
        for entry in entries:
            del self._wanted[entry]

    async def restore(self, copier: HostCopier, hashes: Sequence[bytes]) -> None:
        """Copies missing blocks from the host tier.

        Raises:
            TransportError: they could not be copied. None of them count.
        """
        started_s, began_s = wall_s(), self._core.clock.now_s()
        restore = copier.restore(hashes, self._reserved.groups)
        self._hold.add(restore.transfer)
        await succeeded(restore.transfer)
        for read in restore.reads:
            del self._wanted[read.group, read.index]
        duration_s = self._core.clock.now_s() - began_s
        attributes = {"num_blocks": len(restore.reads)}
        self._timeline.append(Stage("restore", self._core.me.worker_id, started_s, duration_s, attributes))

    def close(self) -> None:
        """Prevents further pulls. Call once."""
        self._hold.close()

    async def _read(
        self, source: KVSource, lease_id: str, entries: list[Entry], offered: Mapping[Entry, Pages]
    ) -> None:
        remote = [offered[entry] for entry in entries]
        local = [self._wanted[entry] for entry in entries]
        await self._former_over(entries)
        started_s, began_s = wall_s(), self._core.clock.now_s()
        try:
            transfer = await self._moved(source, entries, remote, local)
            read_s = self._core.clock.now_s() - began_s
            await self._confirm(source, lease_id, [group for group, _ in entries], remote, local)
        except TandemError as error:
            self._core.metrics.observe_transfer(0, self._core.clock.now_s() - began_s, type(error).__name__)
            raise
        self._core.metrics.observe_transfer(transfer.num_bytes, read_s)
        self._note(source, transfer.num_bytes, len(entries), started_s, read_s, self._core.clock.now_s() - began_s)

    async def _moved(self, source: KVSource, entries: list[Entry], remote: list[Pages], local: list[Pages]) -> Transfer:
        """Reads blocks, a second time if the connection was cut while idle. NOTE: only a read notices that; it fails at
        once, and the next one uses a new connection.
        """
        began_s = self._core.clock.now_s()
        transfer = self._begun(source, entries, remote, local)
        try:
            await succeeded(transfer)
        except TransportError as error:
            is_slow = self._core.clock.now_s() - began_s > _CUT_WITHIN_S
            if is_slow or not (transfer.is_over and source.is_readable):
                raise
            logger.info("a read from worker %s is repeated: %s", source.worker.worker_id, error)
            transfer = self._begun(source, entries, remote, local)
            await succeeded(transfer)
        return transfer

    def _begun(self, source: KVSource, entries: list[Entry], remote: list[Pages], local: list[Pages]) -> Transfer:
        transfer = source.read(entries, remote, local, self._core.clock)
        self._hold.add(transfer)
        self._writers.update(dict.fromkeys(entries, transfer))
        return transfer

    async def _former_over(self, entries: list[Entry]) -> None:
        """Waits until earlier reads into these blocks are over. NOTE: a failed read may still write, and would
        overwrite another one's bytes.
        """
        for transfer in {id(t): t for entry in entries if (t := self._writers.get(entry)) is not None}.values():
            try:
                async with asyncio.timeout(FORMER_OVER_S):
                    await called_back(transfer.add_over_callback)
            except TimeoutError:
                raise TransportError("an earlier read that failed may still write to the same blocks") from None

    async def _confirm(
        self, source: KVSource, lease_id: str, groups: list[int], remote: list[Pages], local: list[Pages]
    ) -> None:
        await confirm(self._core, source, lease_id, groups, remote, local)

    def _note(
        self, source: KVSource, num_bytes: int, num_blocks: int, started_s: float, read_s: float, whole_s: float
    ) -> None:
        attributes: dict[str, str | int | float] = {
            "source": source.worker.worker_id,
            "transport": source.transport.name,
            "num_blocks": num_blocks,
            "num_bytes": num_bytes,
            "source_ranks": source.peer.num_ranks,
            "gb_per_s": num_bytes / max(read_s, 1e-9) / 1e9,
        }
        self._timeline.append(Stage("transfer", self._core.me.worker_id, started_s, whole_s, attributes))


def _entries(groups: tuple[BlockRange, ...]) -> dict[Entry, Pages]:
    return {
        (group, index): pages
        for group, found in enumerate(groups)
        for index, pages in enumerate(found.pages(), found.first_index)
    }
