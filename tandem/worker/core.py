"""Dependencies that the parts of one worker (its RPC service, hand-offs, fetches, reports) share: the engine, leases on
its blocks, transports and more. Holds no state of its own.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tandem.core.clock import Clock
from tandem.engine.async_engine import AsyncEngine
from tandem.engine.drafts.hand_over import DraftHandOver
from tandem.kvcache.ranked_layout import RankedLayout
from tandem.rpc.credentials import Credentials
from tandem.rpc.messages import Greeting, WorkerAddress
from tandem.rpc.rank_messages import RankReport
from tandem.telemetry.engine_metrics import WorkerMetrics
from tandem.telemetry.tracing import Tracing
from tandem.transport.choose import Site
from tandem.worker.checksums import PageChecksums
from tandem.worker.host_tier import HostCopier
from tandem.worker.leases import LeaseBook
from tandem.worker.transports import Transports


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCore:
    """Objects that the parts of one worker share.

    Args:
        me: id, address and incarnation (run of the worker's process) of this worker, as peers know it.
        epoch: number that grows with every incarnation.
        leases: what peers hold of this worker's blocks.
        site: host, user and device, from which a transport to a peer is chosen.
        compatibility: properties that must be equal at a peer, by name; sent in `greeting`, and compared by each side.
        ranked: layout of a block's parts at this worker's ranks.
        block_size: tokens of a block of the KV pool.
        block_bytes: bytes of a block at all ranks together.
        num_blocks: blocks of the pool, which each rank has, with block 0 that is never given out.
        num_ranks: processes among which the model is divided.
        ranks: tells how these are now; returns None where there is only one process.
        host: copies pinned blocks to and from the host tier; None = there is none.
        credentials: of this incarnation, for calls to peers.
        draft_states: moves states of the drafter to and from peers; None = it has none that could be moved.
    """

    me: WorkerAddress
    epoch: int
    engine: AsyncEngine
    leases: LeaseBook
    transports: Transports
    checksums: PageChecksums
    metrics: WorkerMetrics
    tracing: Tracing
    site: Site
    compatibility: Mapping[str, str]
    vocab_size: int
    ranked: RankedLayout
    block_size: int
    block_bytes: int
    num_blocks: int
    clock: Clock
    credentials: Credentials
    num_ranks: int = 1
    ranks: Callable[[], RankReport | None] = lambda: None
    host: HostCopier | None = None
    draft_states: DraftHandOver | None = None

    def greeting(self, protocol_version: int) -> Greeting:
        """This worker's message of a handshake with a peer."""
        return Greeting(
            worker=self.me,
            epoch=self.epoch,
            protocol_version=protocol_version,
            compatibility=self.compatibility,
            site=self.site.to_fields(),
            cards=self.transports.cards,
            num_blocks=self.num_blocks,
        )
