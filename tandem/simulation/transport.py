"""KV transport between simulated workers: one-sided reads, as with RDMA, in which the source's process takes no part.

A read copies its runs piece by piece over its duration, so it may see a page before and after a change. A read that
fails may go on writing for a while, as the contract of `transport.base` allows. Owns no memory.
"""

import ctypes
import itertools
from collections.abc import Callable, Sequence
from contextvars import Context

from tandem.core.errors import TransportError
from tandem.simulation.fabric import Fabric
from tandem.simulation.node import Node
from tandem.transport.base import MemoryPool, Peer
from tandem.transport.blocks import Run, batches, plan_read
from tandem.transport.card import Identity, accept, describe, seal
from tandem.transport.peers import peer_of
from tandem.transport.transfer import Transfer

DEADLINE_S = 3.0  # of a read without one of its own
_LATENCY_S = 2e-4
_BYTES_PER_S = 5e6
_BLOCKS_PER_PIECE = 2
_LATE_SHARE = 0.5  # of the failed reads, those that write on
_LATE_S = 0.6  # in which a failed read may still write


class TransportRegistry:
    """The transports that can reach each other, by incarnation."""

    def __init__(self) -> None:
        self.by_incarnation: dict[str, SimulatedTransport] = {}


class SimulatedTransport:
    """`KVTransport` of one node. `on_write` is called with the blocks that a piece of a read is about to write."""

    name = "inproc"  # NOTE: what two workers of one process choose

    def __init__(
        self, fabric: Fabric, node: Node, pool: MemoryPool, identity: Identity, registry: TransportRegistry
    ) -> None:
        self.node = node
        self.pool = pool
        self.on_write: Callable[[Sequence[int]], None] = lambda _: None
        self._fabric = fabric
        self._identity = identity
        self._registry = registry
        self._peers: dict[Peer, str] = {}
        self._numbers = itertools.count(1)
        registry.by_incarnation[identity.incarnation] = self

    def card(self) -> bytes:
        return seal(describe(self.name, self._identity, self.pool, b""), self._identity)

    def connect(self, card: bytes) -> Peer:
        accepted = accept(card, self.name, self._identity, self.pool)
        self._fabric.loop.spend(_LATENCY_S)
        self._source(accepted.incarnation)
        peer = peer_of(accepted, self.pool, next(self._numbers))
        self._peers[peer] = accepted.incarnation
        return peer

    def read(
        self,
        peer: Peer,
        remote_blocks: Sequence[int],
        local_blocks: Sequence[int],
        deadline_s: float | None = None,
    ) -> Transfer:
        if peer not in self._peers:
            raise TransportError(f"{peer} is not connected to this worker; connect to its card again")
        unit_bytes = peer.unit_bytes
        runs = plan_read(remote_blocks, local_blocks, peer.num_blocks, self.pool.num_bytes // unit_bytes)
        transfer = Transfer(len(remote_blocks) * unit_bytes, self.node)
        pieces = list(batches(runs, self._piece_bytes // unit_bytes))
        loop = self._fabric.loop
        if loop.in_job:  # NOTE: a thread that waits for it; here time passes only as it says
            self._read_at_once(peer, pieces, transfer)
        else:
            limit_s = transfer.started_s + (DEADLINE_S if deadline_s is None else deadline_s)
            loop.call_later(self._fabric.delay_s(), self._copy, peer, pieces, transfer, limit_s, context=self._context)
        return transfer

    def disconnect(self, peer: Peer) -> None:
        self._peers.pop(peer, None)

    def close(self) -> None:
        self._peers.clear()
        self._registry.by_incarnation.pop(self._identity.incarnation, None)

    def _read_at_once(self, peer: Peer, pieces: Sequence[list[Run]], transfer: Transfer) -> None:
        self._fabric.loop.spend(_LATENCY_S + transfer.num_bytes / _BYTES_PER_S)
        try:
            source = self._source(peer.incarnation)
        except TransportError as error:
            transfer.fail(error)
            return
        for piece in pieces:
            self._move(source, piece, peer.unit_bytes)
        transfer.succeed()

    def _copy(self, peer: Peer, pieces: list[list[Run]], transfer: Transfer, limit_s: float) -> None:
        """Copies one piece and schedules the next. Runs like a network card: also while the process is paused."""
        loop = self._fabric.loop
        if self.node.is_dead:
            return
        try:
            if peer not in self._peers:
                raise TransportError("the peer was disconnected while a read of it was under way")
            if self._fabric.loop.time() > limit_s:
                raise TransportError(f"a read of {transfer.num_bytes} bytes missed its deadline")
            source = self._source(peer.incarnation)
        except TransportError as error:
            self._fail(peer, pieces, transfer, error)
            return
        if pieces:
            self._move(source, pieces.pop(0), peer.unit_bytes)
            seconds = self._piece_bytes / _BYTES_PER_S
            seconds += self._fabric.random.expovariate(1 / _LATENCY_S)
            seconds += self._fabric.random.random() * self._fabric.conditions.read_s
            loop.call_later(seconds, self._copy, peer, pieces, transfer, limit_s, context=self._context)
        else:
            loop.call_soon(transfer.succeed, context=self.node.context)

    def _fail(self, peer: Peer, pieces: list[list[Run]], transfer: Transfer, error: TransportError) -> None:
        """Fails a read. Half of the time its remaining pieces are in flight: they are written later, and then the
        transfer is over.
        """
        loop = self._fabric.loop
        if not pieces or self._fabric.random.random() >= _LATE_SHARE:
            loop.call_soon(transfer.fail, error, context=self.node.context)
            return
        loop.call_soon(lambda: transfer.fail(error, is_over=False), context=self.node.context)
        late_s = self._fabric.random.uniform(0, _LATE_S)
        loop.call_later(late_s, self._write_late, peer, pieces, transfer, context=self._context)

    def _write_late(self, peer: Peer, pieces: list[list[Run]], transfer: Transfer) -> None:
        source = self._registry.by_incarnation.get(peer.incarnation)
        if source is not None and not self.node.is_dead:
            for piece in pieces:
                self._move(source, piece, peer.unit_bytes)
        self._fabric.loop.call_soon(transfer.settle, context=self.node.context)

    @property
    def _piece_bytes(self) -> int:
        """Size of a piece: a few blocks on all ranks together."""
        return _BLOCKS_PER_PIECE * self.pool.page_bytes * self.pool.num_ranks

    def _move(self, source: "SimulatedTransport", runs: Sequence[Run], unit: int) -> None:
        for remote, local, count in runs:
            self.on_write(self._blocks_of(local * unit, (local + count) * unit))
            ctypes.memmove(self.pool.address + local * unit, source.pool.address + remote * unit, count * unit)

    def _blocks_of(self, start: int, end: int) -> list[int]:
        """Blocks whose pages, on any rank, contain these bytes of the pool."""
        num_blocks, page = self.pool.num_blocks // self.pool.num_ranks, self.pool.page_bytes
        return [index % num_blocks for index in range(start // page, -(-end // page))]

    def _source(self, incarnation: str) -> "SimulatedTransport":
        """The peer's transport. Raises TransportError if its host is dead or out of reach."""
        source = self._registry.by_incarnation.get(incarnation)
        if source is None or source.node.is_dead:
            raise TransportError(f"no worker of incarnation {incarnation} lives")
        if not self._fabric.can_read(self.node.name, source.node.name):
            raise TransportError(f"worker {source.node.name} does not answer")
        return source

    @property
    def _context(self) -> Context:
        """The network's context, NOTE: so that reads continue while the process is paused."""
        return self._fabric.loop.world.context
