"""Message authentication codes (MACs) of handshakes and calls, as pure functions.

Specified in `session.proto`. Invariant: no two sequences of fields have the same bytes under a MAC, and no key serves
two purposes.
"""

import hashlib
import hmac
from dataclasses import dataclass

from tandem.rpc.credentials import Party

HANDSHAKE_PURPOSE = "rpc handshake"
NONCE_BYTES = 32
SESSION_ID_BYTES = 16
_PROOF_BYTES = 32
_CALL_PROOF_BYTES = 16


@dataclass(frozen=True, slots=True)
class Transcript:
    """Fields of both sides' handshake messages, from which the session's key is derived."""

    client: Party
    client_nonce: bytes
    server: Party
    server_nonce: bytes
    session_id: bytes
    protocol: int

    def fields(self) -> tuple[bytes, ...]:
        return (
            *_words(self.client),
            self.client_nonce,
            *_words(self.server),
            self.server_nonce,
            self.session_id,
            _number(self.protocol),
        )


def client_proof(key: bytes, party: Party, nonce: bytes, protocols: tuple[int, int], expected: str) -> bytes:
    """MAC of the message with which a client opens a session.

    Args:
        key: made from the cluster's secret for `HANDSHAKE_PURPOSE`.
        protocols: oldest and newest version that it speaks.
        expected: incarnation that the server must have; "" = any.
    """
    oldest, newest = map(_number, protocols)
    return _mac(key, b"client", *_words(party), nonce, oldest, newest, _text(expected))


def server_proof(key: bytes, transcript: Transcript) -> bytes:
    """MAC of the server's answer, with the same key as `client_proof`."""
    return _mac(key, b"server", *transcript.fields())


def session_key(key: bytes, transcript: Transcript) -> bytes:
    """Key of the session's calls; an eavesdropper without the secret cannot compute it."""
    return _mac(key, b"session", *transcript.fields())


def is_equal(one: bytes, other: bytes) -> bool:
    """Compares in constant time."""
    return hmac.compare_digest(one, other)


class CallProof:
    """Computes the MACs of one session's calls."""

    __slots__ = ("_keyed",)

    def __init__(self, key: bytes) -> None:
        self._keyed = hashlib.blake2b(key=key, digest_size=_CALL_PROOF_BYTES)

    def of(self, number: int, path: str, body: bytes) -> str:
        """MAC in hexadecimal. `body`: the request of a call with a single request, else empty."""
        mac, where = self._keyed.copy(), path.encode()
        mac.update(number.to_bytes(8, "big") + len(where).to_bytes(4, "big") + where)
        mac.update(body)
        return mac.hexdigest()


def _mac(key: bytes, *fields: bytes) -> bytes:
    mac = hashlib.blake2b(key=key, digest_size=_PROOF_BYTES)
    for each in fields:
        mac.update(_number(len(each)) + each)
    return mac.digest()


def _words(party: Party) -> tuple[bytes, bytes, bytes]:
    return _text(party.role), _text(party.address), _text(party.incarnation)


def _text(value: str) -> bytes:
    return value.encode("utf-8", "surrogatepass")


def _number(value: int) -> bytes:
    return value.to_bytes(4, "big")
