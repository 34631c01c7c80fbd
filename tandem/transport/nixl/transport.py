"""`KVTransport` (of `transport.base`) over NIXL. Checks cards and block indices; calls of an agent run on its owner's
thread (`owner`).

NOTE: UCX is kept from TCP unless the environment says otherwise: there a read is emulated by the peer's process, is
slow, and can abort that process when the reader dies, and UCX's port takes writes from everybody. `choose` sends pairs
without another way to our own TCP.
"""

import base64
import json
import threading
from collections import deque
from collections.abc import Sequence
from functools import partial

from tandem.core.clock import Clock, SystemClock
from tandem.core.errors import IncompatiblePeerError, TransportError
from tandem.transport.base import MemoryPool, Peer
from tandem.transport.blocks import Indices, check_pairs
from tandem.transport.card import Card, Identity, accept, describe, seal
from tandem.transport.nixl.agent import IDENTITY_BYTES, NUM_PROBES, AgentAddress, NixlAgent, RemoteAgent, region_of
from tandem.transport.nixl.flight import Flight, Part, PeerLink
from tandem.transport.nixl.owner import FENCE_AFTER_S, AgentOwner
from tandem.transport.peers import PeerTable
from tandem.transport.transfer import Transfer, TransferState

CONNECT_S = 5.0  # until the peer's identity is read
PART_BYTES = 32 << 20  # posting copies on CPU paths: what one post may take, and so how late anything else is seen


class NixlTransport:
    """`KVTransport` by one-sided reads.

    Args:
        pool: CPU or CUDA memory, which must outlive the process's last peer.
        identity: who we are.
        bind_host: where this worker listens; nothing of UCX may listen elsewhere but on loopback.
        fence_after_s: seconds past a read's deadline after which the agent is destroyed if the read is not over.

    Raises:
        ConfigurationError: NIXL is not installed in a version we know, does not start here, or listens elsewhere.
    """

    name = "nixl"

    def __init__(
        self,
        pool: MemoryPool,
        identity: Identity,
        bind_host: str = "127.0.0.1",
        clock: Clock | None = None,
        fence_after_s: float = FENCE_AFTER_S,
    ) -> None:
        self._pool, self._identity = pool, identity
        self._clock = clock or SystemClock()
        self._peers: PeerTable[PeerLink] = PeerTable(self.name, pool)
        proof = bytes.fromhex(identity.incarnation)
        self._owner = AgentOwner(lambda: NixlAgent(pool, proof, bind_host), self._clock, fence_after_s)
        self._part_blocks = max(1, PART_BYTES // pool.page_bytes)
        self._probes = set(range(1, NUM_PROBES + 1))
        self._lock = threading.Lock()

    def card(self) -> bytes:
        agent = self._owner.call(self._owner.agent)
        address = AgentAddress(agent.name, agent.pool, agent.identity)
        fields = address.to_fields() | {"metadata": base64.b64encode(agent.metadata).decode()}
        metadata = json.dumps(fields).encode()
        return seal(describe(self.name, self._identity, self._pool, metadata), self._identity)

    def connect(self, card: bytes) -> Peer:
        self._peers.check_open()
        accepted = accept(card, self.name, self._identity, self._pool)
        if accepted.unit_bytes(self._pool) != self._pool.page_bytes:
            raise IncompatiblePeerError(
                f"peer {accepted.incarnation} has {accepted.num_ranks} ranks, here are {self._pool.num_ranks}, and "
                "nixl reads whole pages; set transport=tcp, or cma on one host"
            )
        address, metadata = _parse_metadata(accepted, self._pool)
        try:
            link = self._owner.link(
                lambda agent: agent.add_remote(address.name, metadata, address.pool, address.identity)
            )
        except TransportError as error:
            raise TransportError(f"peer {accepted.incarnation} cannot be reached: {error}") from error
        try:
            self._recognise(accepted, link)
            return self._peers.add(accepted, link)
        except TransportError:
            self._owner.drop(link)
            raise

    def read(
        self,
        peer: Peer,
        remote_blocks: Sequence[int],
        local_blocks: Sequence[int],
        deadline_s: float | None = None,
    ) -> Transfer:
        link = self._peers.get(peer)
        if link.broken is not None:
            raise TransportError(f"peer {peer.incarnation} was lost: {link.broken}; connect to its card again")
        remote, local = check_pairs(remote_blocks, local_blocks, peer.num_blocks, self._pool.num_blocks)
        parts = [
            Part(len(piece) * self._pool.page_bytes, partial(_read_blocks, piece, local[start : start + len(piece)]))
            for start in range(0, len(remote), self._part_blocks)
            for piece in [remote[start : start + self._part_blocks]]
        ]
        return self._submit(link, parts, deadline_s)

    def disconnect(self, peer: Peer) -> None:
        link = self._peers.pop(peer)
        if link is not None:
            self._owner.drop(link)

    def fence(self) -> None:
        """Last resort against reads that do not end: ends every read before it returns.

        It costs all peers, ours and those that read from us, a new `connect` to a new `card`. Done by itself when a
        read is not over `fence_after_s` past its deadline. Not to be called from a transfer's callback.
        """
        self._owner.fence()

    def close(self) -> None:
        self._peers.drain()
        self._owner.close()

    def _submit(self, link: PeerLink, parts: Sequence[Part], deadline_s: float | None) -> Transfer:
        transfer = Transfer(sum(part.num_bytes for part in parts), self._clock)
        allowance_s = link.pace.begin(transfer.num_bytes)
        limit_s = transfer.started_s + (allowance_s if deadline_s is None else deadline_s)
        self._owner.submit(Flight(link, transfer, limit_s, deque(parts)))
        return transfer

    def _recognise(self, card: Card, link: PeerLink) -> None:
        """Read the peer's identity, which proves that it is alive, is the process of the card, and can be read."""
        with self._lock:
            if not self._probes:
                raise TransportError(f"{NUM_PROBES} connections are under way at once; try again")
            probe = self._probes.pop()
        transfer = self._submit(link, [Part(IDENTITY_BYTES, partial(_read_identity, probe))], CONNECT_S)
        try:
            transfer.wait()
            if transfer.state is not TransferState.DONE:
                raise TransportError(f"peer {card.incarnation} cannot be reached: {transfer.error}")
            read = self._owner.call(lambda: self._owner.agent().identity_read(probe))
        finally:  # NOTE: not before, or another connection's identity could be read into the same row first
            transfer.add_over_callback(lambda _: self._probes.add(probe))
        found = read[: len(card.incarnation) // 2].hex()
        if found != card.incarnation:
            raise IncompatiblePeerError(f"the card is of incarnation {card.incarnation}, but {found} answers there")


def _read_blocks(remote_blocks: Indices, local_blocks: Indices, agent: NixlAgent, remote: RemoteAgent) -> int:
    return agent.read_blocks(remote, remote_blocks, local_blocks)


def _read_identity(probe: int, agent: NixlAgent, remote: RemoteAgent) -> int:
    return agent.read_identity(remote, probe)


def _parse_metadata(card: Card, pool: MemoryPool) -> tuple[AgentAddress, bytes]:
    """Returns the address of the peer's memory and NIXL's metadata. The MAC is verified: errors are the peer's bugs."""
    try:
        fields = json.loads(card.metadata)
        address, metadata = AgentAddress.from_fields(fields), base64.b64decode(fields["metadata"], validate=True)
    except (ValueError, KeyError, TypeError) as error:
        raise IncompatiblePeerError(f"the card of peer {card.incarnation} has no NIXL address: {error}") from error
    theirs, ours = address.pool, region_of(pool)
    if (theirs.piece_bytes, theirs.num_pieces) != (card.page_bytes, card.num_blocks):
        raise IncompatiblePeerError(f"the card of peer {card.incarnation} contradicts itself: {theirs}")
    if theirs.memory != ours.memory:
        raise IncompatiblePeerError(f"blocks live in {theirs.memory} at peer {card.incarnation}, in {ours.memory} here")
    return address, metadata
