"""Creates a process's TLS 1.3 contexts (`ssl.SSLContext`), and checks that a process with the same files would accept
its certificate.
"""

import ssl
from pathlib import Path

from tandem.core.errors import ConfigurationError
from tandem.tls.socket import EncryptedSocket

_MAX_FLIGHTS = 8


def server_context(certificate: Path, key: Path, ca: bytes) -> ssl.SSLContext:
    """Context of a server that requires client certificates signed by `ca` (DER).

    Raises `ssl.SSLError` or OSError for unusable files.
    """
    context = _context(ssl.PROTOCOL_TLS_SERVER, certificate, key, ca)
    context.verify_mode = ssl.CERT_REQUIRED
    context.num_tickets = 0  # type: ignore[misc,unused-ignore]  # NOTE: each connection is verified anew
    return context


def client_context(certificate: Path, key: Path, ca: bytes) -> ssl.SSLContext:
    """Context of a client; checks the server's name. Raises `ssl.SSLError` or OSError for unusable files."""
    return _context(ssl.PROTOCOL_TLS_CLIENT, certificate, key, ca)


def _context(protocol: int, certificate: Path, key: Path, ca: bytes) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # NOTE: as gRPC does; a CA may be an intermediate one
    context.load_cert_chain(certificate, key)
    context.load_verify_locations(cadata=ca)
    context.sslsocket_class = EncryptedSocket
    return context


def check_by_handshake(server: ssl.SSLContext, client: ssl.SSLContext, name: str) -> None:
    """Performs a handshake of both in memory, which checks chain, dates, names and usages at both ends. Raises
    `ConfigurationError` if one side refuses the other.

    Raises:
        ConfigurationError: one refuses the other, with the library's reason.
    """
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [
        ("client", client.wrap_bio(to_client, to_server, server_hostname=name)),
        ("server", server.wrap_bio(to_server, to_client, server_side=True)),
    ]
    done: set[str] = set()
    for _ in range(_MAX_FLIGHTS):
        for side, connection in sides:
            try:
                connection.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLError as error:
                reason = getattr(error, "verify_message", "") or error.reason or str(error)
                raise ConfigurationError(f"refused by a {side} that trusts ca.crt: {reason}") from error
            done.add(side)
        if len(done) == len(sides):
            return
    raise ConfigurationError("a handshake with itself does not end")
