"""TLS around the connections of the `tcp` transport: both ends must be workers of the same deployment."""

import socket
import ssl

from tandem.core.errors import IncompatiblePeerError
from tandem.tls.files import Material
from tandem.tls.identity import CertifiedName, CertifiedRole, certified_name
from tandem.tls.socket import dns_names


def wrap_client(connection: socket.socket, material: Material) -> ssl.SSLSocket:
    """Returns the TLS socket that replaces `connection`, before its handshake."""
    name = material.peer_name(CertifiedRole.WORKER)
    return material.client.wrap_socket(connection, server_hostname=name, do_handshake_on_connect=False)


def wrap_server(connection: socket.socket, material: Material) -> ssl.SSLSocket:
    """Like `wrap_client`, for the server side."""
    return material.server.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)


def shake_hands(encrypted: ssl.SSLSocket, material: Material, timeout_s: float) -> None:
    """The TLS handshake, within `timeout_s` in all.

    Raises:
        OSError: it broke off, as an `SSLError` where one side did not accept the other.
        IncompatiblePeerError: another process than a worker of this deployment answers.
    """
    encrypted.settimeout(timeout_s)
    encrypted.do_handshake()
    names = dns_names(encrypted)
    wanted = CertifiedName(CertifiedRole.WORKER, material.name.deployment)
    if certified_name(names) != wanted:
        raise IncompatiblePeerError(
            f"the certificate of the other side is for {', '.join(names) or 'no process'}; {wanted} was expected"
        )
