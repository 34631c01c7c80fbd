"""Messages by which a client and a server open a session, as frozen values, and their forms on the wire."""

from dataclasses import dataclass

from tandem.core.errors import InvalidRequestError
from tandem.rpc.credentials import Party
from tandem.rpc.derive import Forms
from tandem.rpc.kinds import FieldRule
from tandem.rpc.proofs import NONCE_BYTES, SESSION_ID_BYTES
from tandem.rpc.v1 import session_pb2 as pb

_MAX_CHARACTERS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenCall:
    """The client's message of a handshake. `expected_incarnation`: of the server; "" = any."""

    party: Party
    nonce: bytes
    oldest_protocol: int
    newest_protocol: int
    expected_incarnation: str
    proof: bytes

    @property
    def protocols(self) -> tuple[int, int]:
        """Oldest and newest protocol versions that the client speaks."""
        return self.oldest_protocol, self.newest_protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAnswer:
    """The server's message of a handshake. `protocol`: the version to be used in the session."""

    party: Party
    nonce: bytes
    session_id: bytes
    protocol: int
    proof: bytes


def _short(field: str, value: str) -> str:
    if len(value) > _MAX_CHARACTERS:
        raise InvalidRequestError(f"{field} has {len(value)} characters; at most {_MAX_CHARACTERS} are allowed")
    return value


def _of_length(length: int) -> FieldRule:
    def check(field: str, value: bytes) -> bytes:
        if len(value) != length:
            raise InvalidRequestError(f"{field} has {len(value)} bytes; {length} are needed")
        return value

    return FieldRule(check=check)


_SHORT, _NONCE = FieldRule(check=_short), _of_length(NONCE_BYTES)
_forms = Forms()
_forms.add(Party, pb.Party, role=_SHORT, address=_SHORT, incarnation=_SHORT)
OPEN_CALL = _forms.add(OpenCall, pb.OpenRequest, nonce=_NONCE, expected_incarnation=_SHORT)
OPEN_ANSWER = _forms.add(OpenAnswer, pb.OpenResponse, nonce=_NONCE, session_id=_of_length(SESSION_ID_BYTES))
