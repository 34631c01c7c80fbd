"""Messages by which a client and a server open a session, as frozen values, and their forms on the wire."""

from dataclasses import dataclass

from tandem.core.errors import InvalidRequestError
from tandem.rpc.credentials import Party
from tandem.rpc.form import Form, required
from tandem.rpc.proofs import NONCE_BYTES, SESSION_ID_BYTES
from tandem.rpc.v1 import session_pb2 as pb

_MAX_CHARACTERS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenCall:
    """A client's side. `expected_incarnation`: of the server, "" = any; `protocols`: oldest and newest spoken."""

    party: Party
    nonce: bytes
    protocols: tuple[int, int]
    expected_incarnation: str
    proof: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAnswer:
    """A server's side. `protocol`: the one to speak."""

    party: Party
    nonce: bytes
    session_id: bytes
    protocol: int
    proof: bytes


def _put_call(call: OpenCall) -> pb.OpenRequest:
    return pb.OpenRequest(
        party=_put_party(call.party),
        nonce=call.nonce,
        oldest_protocol=call.protocols[0],
        newest_protocol=call.protocols[1],
        expected_incarnation=call.expected_incarnation,
        proof=call.proof,
    )


def _take_call(message: pb.OpenRequest) -> OpenCall:
    return OpenCall(
        party=_take_party(required(message, "party")),
        nonce=_of_length("nonce", message.nonce, NONCE_BYTES),
        protocols=(message.oldest_protocol, message.newest_protocol),
        expected_incarnation=_short("expected_incarnation", message.expected_incarnation),
        proof=message.proof,
    )


def _put_answer(answer: OpenAnswer) -> pb.OpenResponse:
    return pb.OpenResponse(
        party=_put_party(answer.party),
        nonce=answer.nonce,
        session_id=answer.session_id,
        protocol=answer.protocol,
        proof=answer.proof,
    )


def _take_answer(message: pb.OpenResponse) -> OpenAnswer:
    return OpenAnswer(
        party=_take_party(required(message, "party")),
        nonce=_of_length("nonce", message.nonce, NONCE_BYTES),
        session_id=_of_length("session_id", message.session_id, SESSION_ID_BYTES),
        protocol=message.protocol,
        proof=message.proof,
    )


def _put_party(party: Party) -> pb.Party:
    return pb.Party(role=party.role, address=party.address, incarnation=party.incarnation)


def _take_party(message: pb.Party) -> Party:
    return Party(
        _short("role", message.role), _short("address", message.address), _short("incarnation", message.incarnation)
    )


def _short(field: str, value: str) -> str:
    if len(value) > _MAX_CHARACTERS:
        raise InvalidRequestError(f"{field} has {len(value)} characters; at most {_MAX_CHARACTERS} are allowed")
    return value


def _of_length(field: str, value: bytes, length: int) -> bytes:
    if len(value) != length:
        raise InvalidRequestError(f"{field} has {len(value)} bytes; {length} are needed")
    return value


OPEN_CALL: Form[OpenCall] = Form(pb.OpenRequest, _put_call, _take_call)
OPEN_ANSWER: Form[OpenAnswer] = Form(pb.OpenResponse, _put_answer, _take_answer)
