"""Client side of a session: opens it, refuses a server that is not the expected one, and signs calls.

A session is what a handshake agrees on: proven identities of both sides and a key for the calls' proofs. It ends with
the connection it was opened on, or when the server drops it.
"""

from dataclasses import dataclass
from itertools import count

from tandem.core.errors import AnotherIncarnationError, IncompatibleProtocolError, UntrustedPeerError
from tandem.core.machine import random_bytes
from tandem.rpc import proofs
from tandem.rpc.credentials import Credentials, Party
from tandem.rpc.proofs import CallProof, Transcript
from tandem.rpc.protocols import described
from tandem.rpc.session_messages import OpenAnswer, OpenCall


@dataclass(frozen=True, slots=True)
class Expected:
    """Requirements of a client on a server: one of `roles`, and the address that it must state as its own
    (`advertised`; None = any).
    """

    roles: frozenset[str]
    advertised: str | None = None


class Session:
    """An open session that signs calls, each once. `server`: its proven identity; `protocol`: the agreed version."""

    def __init__(self, session_id: bytes, key: bytes, server: Party, protocol: int) -> None:
        self.server = server
        self.protocol = protocol
        self._id = session_id.hex()
        self._proof = CallProof(key)
        self._numbers = count(1)

    def signed(self, path: str, body: bytes = b"") -> str:
        """Returns the header that proves the next call. `body`: the request of a call with a single request."""
        number = next(self._numbers)
        return f"{self._id}.{number}.{self._proof.of(number, path, body)}"


class Handshake:
    """Client side of one handshake: the message to send and the check of the answer."""

    def __init__(self, credentials: Credentials, expected: Expected, address: str, incarnation: str = "") -> None:
        self._key = credentials.key(proofs.HANDSHAKE_PURPOSE)
        self._expected = expected
        self._address = address
        self._spoken = credentials.spoken
        party, nonce = credentials.party, random_bytes(proofs.NONCE_BYTES)
        proof = proofs.client_proof(self._key, party, nonce, self._spoken, incarnation)
        self.call = OpenCall(
            party=party,
            nonce=nonce,
            oldest_protocol=self._spoken[0],
            newest_protocol=self._spoken[1],
            expected_incarnation=incarnation,
            proof=proof,
        )

    def session(self, answer: OpenAnswer) -> Session:
        """The session opened by the server's answer.

        Raises:
            UntrustedPeerError: the server does not know the secret, or is not the expected one.
            IncompatibleProtocolError: it chose a protocol that this process does not speak.
            AnotherIncarnationError: it was restarted.
        """
        server, call = answer.party, self.call
        transcript = Transcript(call.party, call.nonce, server, answer.nonce, answer.session_id, answer.protocol)
        if not proofs.is_equal(answer.proof, proofs.server_proof(self._key, transcript)):
            raise UntrustedPeerError(
                f"{self._address} does not prove that it knows the cluster secret, so it is told nothing; give every "
                "process the same secret, and find out what listens there"
            )
        self._check(server, answer.protocol)
        return Session(answer.session_id, proofs.session_key(self._key, transcript), server, answer.protocol)

    def _check(self, server: Party, protocol: int) -> None:
        expected = self._expected
        if server.role not in expected.roles:
            wanted = " or ".join(sorted(expected.roles))
            raise UntrustedPeerError(f"{self._address} is a {server.role}; a {wanted} was expected there")
        if expected.advertised not in (None, server.address):
            raise UntrustedPeerError(
                f"what answers at {self._address} is the {server.role} of {server.address}; {expected.advertised} was "
                "expected there"
            )
        if not self._spoken[0] <= protocol <= self._spoken[1]:
            raise IncompatibleProtocolError(
                f"{self._address} wants to speak protocol {protocol}; this process speaks {described(self._spoken)}"
            )
        check_incarnation(server, self.call.expected_incarnation)


def check_incarnation(server: Party, incarnation: str) -> None:
    """Raises an error for a server that was started again. `incarnation`: the expected one, "" = any.

    Raises:
        AnotherIncarnationError: naming both.
    """
    if incarnation not in ("", server.incarnation):
        raise AnotherIncarnationError(
            f"the {server.role} at {server.address} is incarnation {server.incarnation} now, not {incarnation}"
        )
