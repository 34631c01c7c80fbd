"""Sessions of a server: opens them, and admits the calls that prove to belong to one.

Invariant: nothing is stored for a caller that has not proved to know the secret. At most `max_sessions` used and
`max_unused` unused sessions are stored; the least recently used one is dropped first, and its client opens another
transparently.
"""

from collections import OrderedDict

import grpc

from tandem.core.machine import random_bytes
from tandem.rpc import proofs
from tandem.rpc.call_window import CallWindow
from tandem.rpc.credentials import Credentials, Party
from tandem.rpc.permissions import permission_problem
from tandem.rpc.proofs import CallProof, Transcript
from tandem.rpc.protocols import newest_common
from tandem.rpc.session import check_incarnation
from tandem.rpc.session_messages import OpenAnswer, OpenCall
from tandem.rpc.status import SESSION_KEY, UNKNOWN_SESSION, Metadata

MAX_SESSIONS = 1 << 16  # used ones
MAX_UNUSED = 1 << 14  # NOTE: as many workers may connect to a router that was started again at once
_MAX_NUMBER_DIGITS = 18


class NotAdmittedError(Exception):
    """A call or handshake refused before it reaches its handler, with gRPC's status and trailing metadata."""

    def __init__(self, code: grpc.StatusCode, words: str, trailing: Metadata = ()) -> None:
        super().__init__(words)
        self.code = code
        self.trailing = trailing

    @property
    def is_forgotten(self) -> bool:
        """Whether the only reason is that its session is unknown, so the client opens another."""
        return (SESSION_KEY, UNKNOWN_SESSION) in self.trailing


class _Session:
    """An open session. `client_nonce`, `certificates`: of its handshake and of the connection it was made on."""

    __slots__ = ("certificates", "client", "client_nonce", "numbers", "proof")

    def __init__(self, client: Party, client_nonce: bytes, key: bytes, certificates: bytes) -> None:
        self.client = client
        self.certificates = certificates
        self.client_nonce = client_nonce
        self.proof = CallProof(key)
        self.numbers = CallWindow()


class SessionTable:
    """All sessions of one server.

    Sessions that were never used are stored apart: replaying a recorded handshake opens a session for which the sender
    has no key, and must not displace used ones.
    """

    def __init__(
        self, credentials: Credentials, max_sessions: int = MAX_SESSIONS, max_unused: int = MAX_UNUSED
    ) -> None:
        self._party = credentials.party
        self._spoken = credentials.spoken
        self._key = credentials.key(proofs.HANDSHAKE_PURPOSE)
        self._max_sessions = max_sessions
        self._max_unused = max_unused
        self._used: OrderedDict[str, _Session] = OrderedDict()
        self._unused: OrderedDict[str, _Session] = OrderedDict()
        self._client_nonces: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._used) + len(self._unused)

    def open(self, call: OpenCall, certificates: bytes = b"") -> OpenAnswer:
        """Opens a session for a caller; `drop` ends it by the caller's `certificates`.

        Raises:
            NotAdmittedError: the caller does not know the secret, or repeats a handshake.
            IncompatibleProtocolError: there is no common protocol.
            AnotherIncarnationError: the caller expects another incarnation than this one.
        """
        expected = proofs.client_proof(self._key, call.party, call.nonce, call.protocols, call.expected_incarnation)
        if not proofs.is_equal(call.proof, expected):
            raise NotAdmittedError(grpc.StatusCode.UNAUTHENTICATED, "the cluster secret differs")
        if call.nonce in self._client_nonces:
            raise NotAdmittedError(grpc.StatusCode.UNAUTHENTICATED, "this handshake was made before")
        check_incarnation(self._party, call.expected_incarnation)
        protocol = newest_common(call.protocols, self._spoken)
        nonce, session_id = random_bytes(proofs.NONCE_BYTES), random_bytes(proofs.SESSION_ID_BYTES)
        transcript = Transcript(call.party, call.nonce, self._party, nonce, session_id, protocol)
        session = _Session(call.party, call.nonce, proofs.session_key(self._key, transcript), certificates)
        self._client_nonces.add(call.nonce)
        self._unused[session_id.hex()] = session
        self._drop_oldest(self._unused, self._max_unused)
        return OpenAnswer(
            party=self._party,
            nonce=nonce,
            session_id=session_id,
            protocol=protocol,
            proof=proofs.server_proof(self._key, transcript),
        )

    def knows(self, header: str) -> bool:
        """Whether the header of a call names an open session; this proves nothing about the caller."""
        session_id = header.partition(".")[0]
        return session_id in self._used or session_id in self._unused

    def drop(self, certificates: bytes) -> None:
        """Forgets all sessions that were opened with these certificates."""
        for sessions in (self._used, self._unused):
            for session_id in [key for key, each in sessions.items() if each.certificates == certificates]:
                self._client_nonces.discard(sessions.pop(session_id).client_nonce)

    def admit(self, header: str, path: str, body: bytes) -> Party:
        """Checks a call and returns the proven identity of its caller.

        Args:
            header: written by `Session.signed`.
            body: the request of a call with a single request.

        Raises:
            NotAdmittedError: the session is unknown, the proof is wrong, the call is a repetition, or the role may not
                call this method.
        """
        session_id, number, proof = _parts(header)
        session = self._used.get(session_id) or self._unused.get(session_id)
        if session is None:
            words, trailing = "this session is not known here", ((SESSION_KEY, UNKNOWN_SESSION),)
            raise NotAdmittedError(grpc.StatusCode.UNAUTHENTICATED, words, trailing)
        if not proofs.is_equal(proof.encode(), session.proof.of(number, path, body).encode()):
            raise NotAdmittedError(grpc.StatusCode.UNAUTHENTICATED, "the call does not prove who sent it")
        if not session.numbers.accept(number):
            raise NotAdmittedError(grpc.StatusCode.UNAUTHENTICATED, f"call {number} of this session was made before")
        self._note_use(session_id, session)
        reason = permission_problem(session.client.role, path)
        if reason is not None:
            raise NotAdmittedError(grpc.StatusCode.PERMISSION_DENIED, reason)
        return session.client

    def _note_use(self, session_id: str, session: _Session) -> None:
        if session_id in self._used:
            self._used.move_to_end(session_id)
            return
        del self._unused[session_id]
        self._used[session_id] = session
        self._drop_oldest(self._used, self._max_sessions)

    def _drop_oldest(self, sessions: OrderedDict[str, _Session], most: int) -> None:
        if len(sessions) > most:
            _, dropped = sessions.popitem(last=False)
            self._client_nonces.discard(dropped.client_nonce)


def _parts(header: str) -> tuple[str, int, str]:
    session_id, _, rest = header.partition(".")
    number, _, proof = rest.partition(".")
    if not (number.isascii() and number.isdecimal() and len(number) <= _MAX_NUMBER_DIGITS and int(number) > 0):
        raise NotAdmittedError(
            grpc.StatusCode.UNAUTHENTICATED, "the call carries no proof; a client opens a session first (Session/Open)"
        )
    return session_id, int(number), proof
