"""Calls made without our client: with a session opened by hand, so that tests can repeat, change and forge them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import grpc

from tandem.rpc import methods
from tandem.rpc.credentials import Credentials
from tandem.rpc.session import Expected, Handshake, Session
from tandem.rpc.session_messages import OpenAnswer, OpenCall
from tandem.rpc.session_table import SessionTable
from tandem.rpc.status import PROOF_KEY

ANYONE = Expected(frozenset({"gateway", "router", "prefill", "decode", "both", "planner", "operator"}))


@dataclass(frozen=True, slots=True)
class Ended:
    """End of a raw call. `answers`: those that came before it."""

    code: grpc.StatusCode
    details: str
    answers: tuple[bytes, ...] = ()


async def ended(channel: grpc.aio.Channel, path: str, data: bytes, metadata: Any = ()) -> Ended:
    """The end of a call with one request."""
    stream: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(path)
    answers: list[bytes] = []
    try:
        async for answer in stream(data, metadata=metadata, timeout=5.0):
            answers.append(answer)
    except grpc.aio.AioRpcError as error:
        return Ended(error.code(), error.details() or "", tuple(answers))
    return Ended(grpc.StatusCode.OK, "", tuple(answers))


def handshake(credentials: Credentials, **changes: Any) -> tuple[Handshake, OpenCall]:
    """One, and what it sends; `changes` are made after it was proved."""
    begun = Handshake(credentials, ANYONE, "here")
    return begun, replace(begun.call, **changes)


async def opened(channel: grpc.aio.Channel, credentials: Credentials) -> Session:
    """A session with what listens there."""
    begun, call = handshake(credentials)
    return begun.session(await answer_to(channel, call))


async def answer_to(channel: grpc.aio.Channel, call: OpenCall) -> OpenAnswer:
    """Raises grpc.aio.AioRpcError when it is refused."""
    open_: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(methods.OPEN.path)
    return methods.OPEN.answer.decode(await open_(methods.OPEN.request.encode(call), timeout=5.0))


def opener(credentials: Callable[[], Credentials]) -> "grpc.RpcMethodHandler[bytes, bytes]":
    """Answers handshakes where a test serves the rest by hand, as whoever it is then."""

    async def serve(data: bytes, context: object) -> bytes:
        return methods.OPEN.answer.encode(SessionTable(credentials()).open(methods.OPEN.request.decode(data)))

    return grpc.unary_unary_rpc_method_handler(serve)


def header(session: Session, path: str, data: bytes) -> tuple[tuple[str, str], ...]:
    """The metadata of the session's next call."""
    return ((PROOF_KEY, session.signed(path, data)),)
