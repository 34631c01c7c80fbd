"""Joins another host to the leader of a group: both prove that they know the cluster's secret, then compare releases.

    leader → host  HELLO   magic, version, nonce
    host → leader  JOIN    magic, version, nonce, host id, direction, length of the release, MAC; the release
    leader → host  ANSWER  status, length of the reason, MAC; the reason

Each MAC covers both nonces and all that its sender says, so neither can be replayed, reflected or changed. With
certificates all of it goes over TLS, and both sides must be workers of one deployment. A host makes two connections,
one for each direction: an encrypted socket has one user at each end.
"""

import contextlib
import hmac
import platform
import secrets
import socket
import ssl
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum

import torch

from tandem import __version__
from tandem.compute.native.build import build
from tandem.core.errors import ConfigurationError, IncompatiblePeerError, TransportError, shown
from tandem.tls.files import TlsFiles
from tandem.tls.peers import PeerCertificate, chain_of
from tandem.transport.tcp import wire
from tandem.transport.tcp.encryption import shake_hands, wrap_client, wrap_server

MAGIC, PROTOCOL_VERSION = b"TKRH", 1
HELLO = struct.Struct("!4sH32s")
JOIN = struct.Struct("!4sH32s16sBH32s")
ANSWER = struct.Struct("!BH32s")
HANDSHAKE_S = 5.0  # in all, TLS included
_TICK_S = 0.1  # between two looks at the time
_MAX_RELEASE_BYTES = 512


class Direction(IntEnum):
    """Direction in which a connection carries frames."""

    TO_HOST = 0
    TO_LEADER = 1


class _Status(IntEnum):
    JOINED = 0
    REFUSED = 1  # for good: the reason says why
    FULL = 2  # as yet


@dataclass(frozen=True, slots=True)
class Proof:
    """Credentials of a process: the cluster's secret as a key, and a certificate.

    Args:
        key: derived from the cluster's secret for this purpose alone.
        tls: its certificate; None = plain text.
    """

    key: bytes = field(repr=False)
    tls: TlsFiles | None = None

    def mac(self, side: bytes, *said: bytes) -> bytes:
        """MAC of what one side says."""
        return hmac.digest(self.key, b"\0".join([side, *said]), "sha256")


@dataclass(frozen=True, slots=True)
class JoiningHost:
    """One connection of a host that has proved its identity. `is_accepted`: returns whether its certificate is still
    accepted.
    """

    host_id: bytes
    direction: Direction
    connection: socket.socket
    address: str
    is_accepted: Callable[[], bool]


def own_release() -> str:
    """Versions that must be equal on all hosts of a group, since the computed bits depend on them."""
    kernels = build().stem.rpartition("_")[2]
    return f"Tandem {__version__}, PyTorch {torch.__version__}, Python {platform.python_version()}, kernels {kernels}"


def join(
    address: tuple[str, int], proof: Proof, host_id: bytes, direction: Direction, release: str
) -> tuple[socket.socket, Callable[[], bool]]:
    """Connects to the leader at `address`, as a host. Returns the connection and a check whether the leader's
    certificate is still accepted.

    Raises:
        ConfigurationError: it refuses this host for good; the message says why.
        TransportError: it does not answer, or has no place as yet.
    """
    where = f"{address[0]}:{address[1]}"
    try:
        connection = socket.create_connection(address, timeout=HANDSHAKE_S)
    except OSError as error:
        raise TransportError(f"the leader at {where} cannot be reached: {error}") from error
    tick = _ticks()
    try:
        is_accepted: Callable[[], bool] = _is_plain
        if proof.tls is not None:
            material = proof.tls.current()
            connection = encrypted = wrap_client(connection, material)
            shake_hands(encrypted, material, HANDSHAKE_S)
            is_accepted = PeerCertificate(proof.tls, chain_of(encrypted)).is_accepted
        _prove_as_host(connection, where, proof, host_id, direction, release, tick)
    except OSError as error:
        connection.close()
        if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
            raise ConfigurationError(
                f"the leader at {where} and this host do not accept each other's certificates: {error}; give both a "
                "tls_dir with certificates of the same CA"
            ) from error
        raise TransportError(f"the handshake with the leader at {where} broke off: {error}") from error
    except (TransportError, ConfigurationError):
        connection.close()
        raise
    return connection, is_accepted


def _prove_as_host(
    connection: socket.socket,
    where: str,
    proof: Proof,
    host_id: bytes,
    direction: Direction,
    release: str,
    tick: wire.Tick,
) -> None:
    _tune(connection)
    magic, version, nonce = HELLO.unpack(wire.receive(connection, HELLO.size, tick))
    if (magic, version) != (MAGIC, PROTOCOL_VERSION):
        raise ConfigurationError(
            f"{where} speaks {magic!r} version {version}, and this host {MAGIC!r} version {PROTOCOL_VERSION}: no "
            "leader of this release listens there; see --leader"
        )
    own, words = secrets.token_bytes(wire.NONCE_BYTES), release.encode()[:_MAX_RELEASE_BYTES]
    mac = proof.mac(b"host", nonce, own, host_id, bytes([direction]), words)
    connection.sendall(JOIN.pack(MAGIC, PROTOCOL_VERSION, own, host_id, direction, len(words), mac) + words)
    status, length, answered = ANSWER.unpack(wire.receive(connection, ANSWER.size, tick))
    reason = wire.receive(connection, min(length, wire.MAX_REFUSAL_BYTES), tick)
    if not hmac.compare_digest(answered, proof.mac(b"leader", nonce, own, bytes([status]), reason)):
        raise ConfigurationError(
            f"{where} and this host do not share a cluster secret; start both with the same TANDEM_CLUSTER_SECRET"
        )
    if status == _Status.REFUSED:
        raise ConfigurationError(f"the leader at {where} refuses this host: {reason.decode(errors='replace')}")
    if status != _Status.JOINED:
        raise TransportError(f"the leader at {where} has no place: {reason.decode(errors='replace')}")


def admit(
    connection: socket.socket, address: str, proof: Proof, release: str, why_full: Callable[[bytes], str | None]
) -> JoiningHost:
    """Checks a host's handshake, as the leader. `connection` is closed unless this returns.

    Args:
        why_full: given a host's id, why there is no place for it; None = there is one.

    Raises:
        TransportError: it is none of this group; it was told why if it knows the secret.
        OSError: the connection broke.
    """
    tick = _ticks()
    with contextlib.ExitStack() as opened:
        opened.callback(lambda: connection.close())
        is_accepted: Callable[[], bool] = _is_plain
        if proof.tls is not None:
            material = proof.tls.current()
            connection = encrypted = wrap_server(connection, material)
            shake_hands(encrypted, material, HANDSHAKE_S)
            is_accepted = PeerCertificate(proof.tls, chain_of(encrypted)).is_accepted
        host = _prove_as_leader(connection, address, proof, release, why_full, is_accepted, tick)
        opened.pop_all()
        return host


def _prove_as_leader(
    connection: socket.socket,
    address: str,
    proof: Proof,
    release: str,
    why_full: Callable[[bytes], str | None],
    is_accepted: Callable[[], bool],
    tick: wire.Tick,
) -> JoiningHost:
    _tune(connection)
    nonce = secrets.token_bytes(wire.NONCE_BYTES)
    connection.sendall(HELLO.pack(MAGIC, PROTOCOL_VERSION, nonce))
    magic, version, theirs, host_id, direction, length, mac = JOIN.unpack(wire.receive(connection, JOIN.size, tick))
    words = wire.receive(connection, min(length, _MAX_RELEASE_BYTES), tick)
    is_known = hmac.compare_digest(mac, proof.mac(b"host", nonce, theirs, host_id, bytes([direction]), words))
    if (magic, version) != (MAGIC, PROTOCOL_VERSION) or not is_known:
        connection.sendall(ANSWER.pack(_Status.REFUSED, 0, bytes(32)))
        raise IncompatiblePeerError(f"{address} did not prove that it has the cluster secret")

    def answer(status: _Status, reason: str) -> None:
        said = reason.encode()[: wire.MAX_REFUSAL_BYTES]
        mac = proof.mac(b"leader", nonce, theirs, bytes([status]), said)
        connection.sendall(ANSWER.pack(status, len(said), mac) + said)

    reason = _why_unlike(words.decode(errors="replace"), release, direction)
    if reason is not None:
        answer(_Status.REFUSED, reason)
        raise IncompatiblePeerError(f"{address} was refused: {reason}")
    if (full := why_full(host_id)) is not None:
        answer(_Status.FULL, full)
        raise TransportError(f"{address} was refused: {full}")
    answer(_Status.JOINED, "")
    return JoiningHost(host_id, Direction(direction), connection, address, is_accepted)


def _why_unlike(words: str, release: str, direction: int) -> str | None:
    if words != release:
        told = words if words.isprintable() else shown(words)
        return f"it has {told}, and the leader {release}: all hosts of a group must be alike"
    return None if direction in set(Direction) else f"direction={direction} is none"


def _tune(connection: socket.socket) -> None:
    wire.tune(connection)
    wire.set_timeouts(connection, receive_s=_TICK_S, send_s=HANDSHAKE_S)


def _ticks() -> wire.Tick:
    """A function that raises `TransportError` once the time for a handshake, TLS included, is over."""
    limit_s = time.monotonic() + HANDSHAKE_S

    def tick() -> None:
        if time.monotonic() > limit_s:
            raise TransportError(
                f"no handshake within {HANDSHAKE_S:g} s: the other side has stopped, or one of both uses TLS and the "
                "other none"
            )

    return tick


def _is_plain() -> bool:
    return True
