"""KV transport of a worker on several hosts: peers read each part of the KV from the host that has it.

The leader plans reads and gets their results; the bytes go from the host that has them to the host that needs them.
`transport.base.KVTransport` describes the methods.
"""

from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

import numpy as np

from tandem.core.addresses import is_loopback
from tandem.core.clock import Clock, SystemClock
from tandem.core.errors import ConfigurationError, IncompatiblePeerError, TransportError
from tandem.ranks.kv_messages import (
    ClosePool,
    ConnectPeer,
    DisconnectPeer,
    Failed,
    KVAnswer,
    OpenPool,
    PoolOpened,
    ReadEnded,
    ReadPeer,
)
from tandem.ranks.remote import RemoteHost
from tandem.transport.base import MemoryPool, Peer
from tandem.transport.card import Identity
from tandem.transport.tcp.client import Address
from tandem.transport.tcp.transport import TcpTransport
from tandem.transport.transfer import Transfer

_OPEN_S = 30.0  # until a host has opened its pool
_CONNECT_S = 30.0  # NOTE: of all hosts of a peer, each within its own handshake's time
_CLOSE_S = 5.0  # until a host has ended its reads


class HostsTransport:
    """Implements `KVTransport` by the transports of all hosts.

    Args:
        own: transport of the leader's host, for `pool`.
        pool: the leader's, which has room for the blocks of all hosts.
        others: in the order of their parts of the pool.

    Raises:
        ConfigurationError: a host cannot let peers read its KV, or not where they could reach it.
    """

    name = "tcp"

    def __init__(
        self,
        own: TcpTransport,
        pool: MemoryPool,
        identity: Identity,
        others: Sequence[RemoteHost],
        clock: Clock | None = None,
    ) -> None:
        self._own, self._pool, self._others, self._clock = own, pool, others, clock or SystemClock()
        calls = [
            OpenPool(
                identity.incarnation,
                dict(identity.compatibility),
                pool.page_bytes,
                pool.num_blocks,
                pool.num_ranks,
                pool.piece_bytes,
                pool.stages,
                pool.num_hosts,
                host,
            )
            for host in range(pool.num_hosts)
            if host != pool.host
        ]
        asked = [other.ask(call) for other, call in zip(others, calls, strict=True)]
        self._addresses: list[Address] = []
        for other, future in zip(others, asked, strict=True):
            answer = future.result(_OPEN_S)
            if not isinstance(answer, PoolOpened):
                raise ConfigurationError(f"{other.name} cannot let peers read its KV: {_words(answer)}")
            self._addresses.append(_reachable(other, Address(answer.host, answer.port), own.address))
        self._addresses.insert(pool.host, own.address)
        self._by_place: list[RemoteHost | None] = list(others)
        self._by_place.insert(pool.host, None)

    def card(self) -> bytes:
        return self._own.card_of(self._addresses)

    def connect(self, card: bytes) -> Peer:
        peer = self._own.connect(card)
        asked = [other.ask(ConnectPeer(peer.connection, card)) for other in self._others]
        try:
            for other, future in zip(self._others, asked, strict=True):
                answer = future.result(_CONNECT_S)
                if isinstance(answer, Failed):
                    kind = IncompatiblePeerError if answer.is_for_good else TransportError
                    raise kind(f"{other.name}: {answer.reason}")
        except TimeoutError as error:
            self._take_back(peer, asked)
            raise TransportError(f"not all hosts have connected within {_CONNECT_S:g} s") from error
        except TransportError:
            self._take_back(peer, asked)
            raise
        return peer

    def _take_back(self, peer: Peer, connecting: "Sequence[Future[KVAnswer]]") -> None:
        """Disconnects a peer to which hosts may still be connecting: each is told once it has answered, since the host
        serves calls side by side.
        """
        self._own.disconnect(peer)
        for other, answered in zip(self._others, connecting, strict=True):
            answered.add_done_callback(partial(self._leave, other, peer))

    def _leave(self, other: RemoteHost, peer: Peer, _: object = None) -> None:
        other.ask(DisconnectPeer(peer.connection))

    def read(
        self,
        peer: Peer,
        remote_blocks: Sequence[int],
        local_blocks: Sequence[int],
        deadline_s: float | None = None,
    ) -> Transfer:
        if len(remote_blocks) != len(local_blocks):
            return self._own.read(peer, remote_blocks, local_blocks, deadline_s)  # which refuses it
        remote, local = np.asarray(remote_blocks, dtype=np.int64), np.asarray(local_blocks, dtype=np.int64)
        begins: list[Callable[[], Transfer]] = []
        for host, other in enumerate(self._by_place):
            theirs, ours = remote, local
            if self._pool.num_ranks > 1:
                mine = local * peer.unit_bytes // self._pool.bytes_per_host == host
                theirs, ours = remote[mine], local[mine]
            if not len(ours):
                continue
            if other is None:
                begins.append(partial(self._own.read, peer, theirs.tolist(), ours.tolist(), deadline_s))
            else:
                begins.append(partial(self._read_there, other, peer, theirs, ours, deadline_s))
        if not begins:
            return self._own.read(peer, remote_blocks, local_blocks, deadline_s)
        return Transfer.begun(begins, self._clock)

    def disconnect(self, peer: Peer) -> None:
        self._own.disconnect(peer)
        for other in self._others:
            self._leave(other, peer)

    def close(self) -> None:
        """Ends all reads. NOTE: a host that does not answer is lost, and its memory with it."""
        self._own.close()
        asked = [other.ask(ClosePool()) for other in self._others]
        for other, future in zip(self._others, asked, strict=True):
            try:
                future.result(_CLOSE_S)
            except TimeoutError:
                other.lose(f"it has not ended its reads within {_CLOSE_S:g} s")

    def _read_there(
        self,
        other: RemoteHost,
        peer: Peer,
        remote: "np.typing.NDArray[np.int64]",
        local: "np.typing.NDArray[np.int64]",
        deadline_s: float | None,
    ) -> Transfer:
        transfer = Transfer(len(local) * peer.unit_bytes, self._clock)

        def ended(answer: KVAnswer) -> None:
            """NOTE: what a lost host was to fill is lost too, so nothing can be written any more."""
            if isinstance(answer, ReadEnded) and answer.error is None:
                transfer.succeed()
                return
            is_over = not isinstance(answer, ReadEnded) or answer.is_over
            transfer.fail(TransportError(f"{other.name}: {_words(answer)}"), is_over=is_over)

        units = array("I", remote.tolist()), array("I", local.tolist())
        other.call(ReadPeer(peer.connection, *units, deadline_s), ended)
        return transfer


def _reachable(other: RemoteHost, theirs: Address, own: Address) -> Address:
    if is_loopback(theirs.host) and not is_loopback(own.host):
        raise ConfigurationError(
            f"{other.name} lets peers read its KV at {theirs}, which they cannot reach; give its services.rank_host "
            "--kv-bind and, where that is a wildcard, --advertise-host"
        )
    return theirs


def _words(answer: KVAnswer) -> str:
    match answer:
        case Failed(reason):
            return reason
        case ReadEnded(error):
            return error or "it has ended"
    return f"it answers {type(answer).__name__}"
