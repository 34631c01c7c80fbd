"""Ends the sessions and running streams of callers whose certificates are no longer accepted.

A connection may outlive the certificate files with which it was accepted. The server checks its callers' certificates
again every `CHECK_INTERVAL_S` seconds, against the current files.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

from cryptography import x509

from tandem.core.errors import UntrustedPeerError
from tandem.rpc.session_table import SessionTable
from tandem.tls.files import TlsFiles
from tandem.tls.peers import PeerCertificate

CHECK_INTERVAL_S = 5.0  # between two checks
_OWN, _INTERMEDIATES = "x509_pem_cert", "x509_pem_cert_chain"  # as gRPC calls them
_logger = logging.getLogger(__name__)


class AuthenticatedContext(Protocol):
    """Part of gRPC's context that has the caller's certificates."""

    def auth_context(self) -> Mapping[str, Sequence[bytes]]: ...


class CallerWatch:
    """The callers of one server, by the certificates that they have shown.

    Args:
        tls: the files of this process; None = connections are plain, and nobody is watched.
        sessions: forgets those of callers that are not accepted any more.
    """

    def __init__(self, tls: TlsFiles | None, sessions: SessionTable) -> None:
        self._tls, self._sessions = tls, sessions
        self._peers: dict[bytes, PeerCertificate] = {}
        self._streams: dict[bytes, set[asyncio.Timeout]] = {}

    def accepted(self, context: AuthenticatedContext) -> bytes:
        """The caller's certificates, in PEM; empty without TLS.

        Raises:
            UntrustedPeerError: they are not accepted any more.
        """
        if self._tls is None:
            return b""
        shown = context.auth_context()
        chain = b"".join((*shown[_OWN], *shown.get(_INTERMEDIATES, ())))
        peer = self._peers.get(chain)
        if peer is None:
            peer = PeerCertificate(self._tls, x509.load_pem_x509_certificates(chain))
            if peer.is_accepted():
                self._peers[chain] = peer
        if not peer.is_accepted():
            raise _withdrawn()
        return chain

    @asynccontextmanager
    async def running(self, context: AuthenticatedContext) -> AsyncIterator[None]:
        """Context of a stream, which ends with `UntrustedPeerError` when its caller is not accepted any more."""
        chain = self.accepted(context)
        limit = asyncio.timeout(None)
        try:
            async with limit:
                self._streams.setdefault(chain, set()).add(limit)
                yield
        except TimeoutError as error:
            if limit.expired():
                raise _withdrawn() from error
            raise
        finally:
            self._forget(chain, limit)

    async def run(self) -> None:
        """Checks all callers every `CHECK_INTERVAL_S` seconds, until cancelled; returns at once without TLS."""
        while self._tls is not None:
            await asyncio.sleep(CHECK_INTERVAL_S)
            self.check()

    def check(self) -> None:
        """Checks all callers once; ends the sessions and streams of those whose certificates are no longer accepted."""
        gone = {chain for chain, peer in self._peers.items() if not peer.is_accepted()}
        if gone:
            _logger.warning("%d certificates of callers are not accepted any more; what they had open ends", len(gone))
        for chain in gone:
            del self._peers[chain]
            self._sessions.drop(chain)
            for limit in self._streams.get(chain, ()):
                limit.reschedule(0.0)

    def _forget(self, chain: bytes, limit: asyncio.Timeout) -> None:
        streams = self._streams.get(chain, set())
        streams.discard(limit)
        if not streams:
            self._streams.pop(chain, None)


def _withdrawn() -> UntrustedPeerError:
    return UntrustedPeerError(
        "the certificate of this connection is not accepted any more: it has ended, or its authority is no longer in "
        "ca.crt; connect with a new one"
    )
