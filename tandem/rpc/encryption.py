"""Opens encrypted and plain gRPC connections and ports; no other module creates them.

With certificates both sides prove their identity. A client checks the role and the deployment in the server's
certificate in place of its host name; a server checks those of a client when it opens a session. `tls.files` reads the
certificates: `Material` is their content at one time, `TlsFiles` their directory, reread when it changes. `Credentials`
are all that this process proves its identity by; without `tls` in them its connections are plain.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

import grpc

from tandem.core.errors import UntrustedPeerError
from tandem.rpc.channel import CLIENT_OPTIONS
from tandem.rpc.credentials import Credentials, certified_role
from tandem.tls.files import Material, TlsFiles
from tandem.tls.identity import CertifiedName, CertifiedRole, certified_name

_DNS_NAMES = "peer_dns"  # of the certificate, as gRPC calls them


class CallContext(Protocol):
    """Part of gRPC's context that identifies the caller."""

    def auth_context(self) -> Mapping[str, Sequence[bytes]]: ...


def open_channel(address: str, material: Material | None, role: CertifiedRole) -> grpc.aio.Channel:
    """Opens a channel to a process of that role; gRPC connects later. `material`: this process's certificate, key and
    trusted CAs; None = plain text.
    """
    if material is None:
        return grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS)
    credentials = grpc.ssl_channel_credentials(material.ca, material.key, material.certificate)
    options = (*CLIENT_OPTIONS, ("grpc.ssl_target_name_override", material.peer_name(role)))
    return grpc.aio.secure_channel(address, credentials, options=options)


def add_port(server: grpc.aio.Server, bind: str, tls: TlsFiles | None) -> int:
    """Makes `server` listen at `bind` (host:port) and returns the port. Each new connection reads the certificate
    files again. `tls` None: plain text.

    Raises:
        RuntimeError: `bind` is taken or is no address of this machine.
    """
    if tls is None:
        return server.add_insecure_port(bind)
    credentials = grpc.dynamic_ssl_server_credentials(
        _configuration(tls), lambda: _configuration(tls), require_client_authentication=True
    )
    return server.add_secure_port(bind, credentials)


def check_caller(context: CallContext, role: str, credentials: Credentials) -> None:
    """Refuses, by `UntrustedPeerError`, a caller whose certificate is not for the role that it claims and for this
    deployment. Accepts every caller where calls are plain text.

    Args:
        role: as the caller's handshake states it.
        credentials: of this process.

    Raises:
        UntrustedPeerError: naming both.
    """
    if credentials.tls is None:
        return
    names = [name.decode(errors="replace") for name in context.auth_context().get(_DNS_NAMES, ())]
    deployment = credentials.tls.current().name.deployment
    found = certified_name(names)
    try:
        wanted = CertifiedName(certified_role(role), deployment)
    except ValueError:  # NOTE: no role has this name: refused below
        wanted = None
    if found is None or found != wanted:
        raise UntrustedPeerError(
            f"a process that says to be a {role[:40]!r} of {deployment} has a certificate for "
            f"{', '.join(names)[:300] or 'no process'}; give each process the certificate of its role and deployment"
        )


def _configuration(tls: TlsFiles) -> grpc.ServerCertificateConfiguration:
    material = tls.current()
    return grpc.ssl_server_certificate_configuration([(material.key, material.certificate)], material.ca)
