"""Opens the transports of a worker, by which peers read its blocks and it reads theirs."""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

from tandem.core.errors import ConfigurationError, TransportError
from tandem.ranks.hosts_transport import HostsTransport
from tandem.ranks.remote import RemoteHost
from tandem.tls.files import TlsFiles
from tandem.transport.base import KVTransport, MemoryPool
from tandem.transport.card import Identity
from tandem.transport.choose import AUTO, TRANSPORTS
from tandem.transport.inproc import InprocRegistry
from tandem.transport.tcp.transport import TcpConfig, TcpTransport

logger = logging.getLogger(__name__)


class Transports:
    """All transports that work on this machine, or only the requested one.

    Args:
        pool: this worker's blocks.
        identity: this worker's identity.
        wanted: "auto" or the name of one transport.
        bind_host: the tcp transport's listening host; nothing may listen elsewhere.
        advertise_host: host that peers connect to when `bind_host` is a wildcard.
        kv_port: the tcp transport's port, which must be free; 0 = any free port.
        registry: of the transports of this process; None = no inproc.
        tls: this worker's certificate, for the tcp transport; None = plain.
        has_rdma: whether this host has RDMA devices. Without them nixl is opened for GPU memory only, or if wanted.
        other_hosts: that have parts of the pool, which tcp alone reads.

    Raises:
        ConfigurationError: the requested one, or every one, does not work here.
    """

    def __init__(
        self,
        pool: MemoryPool,
        identity: Identity,
        *,
        wanted: str = AUTO,
        bind_host: str = "127.0.0.1",
        advertise_host: str | None = None,
        kv_port: int = 0,
        registry: InprocRegistry | None = None,
        tls: TlsFiles | None = None,
        has_rdma: bool = False,
        other_hosts: Sequence[RemoteHost] = (),
    ) -> None:
        if wanted not in (AUTO, *TRANSPORTS):
            raise ConfigurationError(
                f"transport={wanted!r} is unknown; choose {AUTO} or one of {', '.join(TRANSPORTS)}"
            )
        makers: dict[str, Callable[[], KVTransport]] = {
            "inproc": lambda: _inproc(pool, identity, registry),
            "cma": lambda: _cma(pool, identity),
            "nixl": lambda: _nixl(pool, identity, bind_host),
            "tcp": lambda: _tcp(pool, identity, TcpConfig(bind_host, kv_port, advertise_host, tls=tls), other_hosts),
        }
        useful = {"inproc": registry is not None, "nixl": has_rdma or not pool.is_cpu}
        self.wanted = wanted
        self._required = {wanted} | ({"tcp"} if kv_port and pool.is_cpu else set())
        self._opened: dict[str, KVTransport] = {}
        for name, make in makers.items():
            if wanted == name or (wanted == AUTO and useful.get(name, True)):
                self._open(name, make)
        if not self._opened:
            raise ConfigurationError("no transport works here; see the warnings above, or install the nixl extra")

    @property
    def cards(self) -> Mapping[str, bytes]:
        """Cards for peers, by transport, of the transports that can be read by now. NOTE: call it each time, since a
        fence replaces or removes a card.
        """
        cards = {}
        for name, transport in self._opened.items():
            try:
                cards[name] = transport.card()
            except TransportError as error:
                logger.warning("transport %s has no card: %s", name, error)
        return cards

    def get(self, name: str) -> KVTransport:
        """The transport of that name.

        Raises:
            TransportError: it does not work here.
        """
        transport = self._opened.get(name)
        if transport is None:
            raise TransportError(f"transport {name!r} is not open here; open are {', '.join(self._opened)}")
        return transport

    def __contains__(self, name: str) -> bool:
        return name in self._opened

    def close(self) -> None:
        for transport in self._opened.values():
            transport.close()

    def _open(self, name: str, make: Callable[[], KVTransport]) -> None:
        try:
            self._opened[name] = make()
        except ConfigurationError as error:
            if name in self._required:
                raise
            logger.log(logging.WARNING if name == "nixl" else logging.INFO, "transport %s is not open: %s", name, error)


def _inproc(pool: MemoryPool, identity: Identity, registry: InprocRegistry | None) -> KVTransport:
    from tandem.transport.inproc import InprocTransport

    if registry is None:
        raise ConfigurationError("transport='inproc' serves workers of one process; this one is alone in its process")
    return InprocTransport(pool, identity, registry)


def _cma(pool: MemoryPool, identity: Identity) -> KVTransport:
    from tandem.transport.cma import CmaTransport

    return CmaTransport(pool, identity)


def _nixl(pool: MemoryPool, identity: Identity, bind_host: str) -> KVTransport:
    from tandem.transport.nixl.transport import NixlTransport

    return NixlTransport(pool, identity, bind_host)


def _tcp(pool: MemoryPool, identity: Identity, config: TcpConfig, others: Sequence[RemoteHost]) -> KVTransport:
    own = TcpTransport(pool, identity, config)
    if not others:
        return own
    with ExitStack() as opened:
        opened.callback(own.close)
        whole = HostsTransport(own, pool, identity, others)
        opened.pop_all()
        return whole
