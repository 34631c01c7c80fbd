"""Maps errors to gRPC statuses and back. Errors without a mapping are our bugs and travel as INTERNAL.

An error's class and `retry_after_s` travel in trailing metadata, so that the caller raises the same class. A status
without them came from gRPC itself; it is read as the peer being gone, full or of an incompatible release.
"""

import math
from collections.abc import Iterable, Mapping

import grpc

from tandem.core import errors
from tandem.core.errors import (
    CapacityError,
    ConfigurationError,
    EngineStoppedError,
    IncompatiblePeerError,
    IncompatibleProtocolError,
    InvalidRequestError,
    LocalityUnavailableError,
    TandemError,
    TransportError,
    UnavailableError,
    UntrustedPeerError,
    WorkerLostError,
    WorkerStoppedError,
)
from tandem.rpc.protocols import PROTOCOL_VERSION, SPOKEN, WITHOUT_SESSIONS, described
from tandem.rpc.serve_messages import CallStatus

Metadata = tuple[tuple[str, str], ...]

PROOF_KEY = "tandem-proof"  # header with a call's proof
SESSION_KEY = "tandem-session"  # header that reports the state of a call's session
UNKNOWN_SESSION = "unknown"
ADMITTED = (SESSION_KEY, "admitted")
FORMER_VERSION_KEY = "tandem-protocol"  # NOTE: what protocol 1 sent with every call
TRACE_KEY = "traceparent"
_CLASS_KEY = "tandem-error"
_RETRY_KEY = "tandem-retry-after-s"
_MAX_DETAIL_BYTES = 2000
_MAX_REASON = 400
# Words of gRPC, which has no code for what ends a connection.
_REFUSED_TLS = ("handshake failed", "Hostname Verification Check failed", "verification check failed")
_CUT_OFF = ("failed to connect", "Socket closed")  # NOTE: not reset or refused, as by a process that has died
_STOPPING = "Cancelling all calls"  # gRPC's words when a server of its own is stopped

_CODES: dict[type[TandemError], grpc.StatusCode] = {
    InvalidRequestError: grpc.StatusCode.INVALID_ARGUMENT,
    ConfigurationError: grpc.StatusCode.FAILED_PRECONDITION,
    IncompatiblePeerError: grpc.StatusCode.FAILED_PRECONDITION,
    CapacityError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    UnavailableError: grpc.StatusCode.UNAVAILABLE,
    EngineStoppedError: grpc.StatusCode.UNAVAILABLE,
    LocalityUnavailableError: grpc.StatusCode.UNAVAILABLE,
    TransportError: grpc.StatusCode.ABORTED,
}
_REFUSALS = (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
_BY_NUMBER: dict[int, grpc.StatusCode] = {code.value[0]: code for code in grpc.StatusCode}
_CLASSES: dict[str, type[TandemError]] = {
    name: member
    for name, member in vars(errors).items()
    if isinstance(member, type) and issubclass(member, TandemError)
}


def code_of(error: BaseException) -> grpc.StatusCode:
    """The status that `error` travels as."""
    return next((_CODES[kind] for kind in type(error).__mro__ if kind in _CODES), grpc.StatusCode.INTERNAL)


def details_of(error: BaseException) -> str:
    """The message that the caller sees; unexpected errors are only named, not quoted."""
    text = str(error) if isinstance(error, TandemError) else f"internal error ({type(error).__name__}); see the log"
    data = text.encode("utf-8", "replace")
    return data[:_MAX_DETAIL_BYTES].decode("utf-8", "ignore")


def metadata_of(error: BaseException) -> Metadata:
    """Trailing metadata from which the caller learns the error's class and retry time."""
    name = next((kind.__name__ for kind in type(error).__mro__ if _CLASSES.get(kind.__name__) is kind), None)
    if name is None:
        return ()
    retry_after_s = getattr(error, "retry_after_s", None)
    retry = () if retry_after_s is None else ((_RETRY_KEY, repr(float(retry_after_s))),)
    return ((_CLASS_KEY, name), *retry)


def error_from(error: grpc.aio.AioRpcError, address: str, method: str, timeout_s: float | None) -> TandemError:
    """Converts gRPC's error to the error that the caller of `method` at `address` raises."""
    trailing = _text_entries(error.trailing_metadata() or ())
    return _error_of(error.code(), error.details() or "", trailing, address, method, timeout_s)


def handshake_error(error: grpc.aio.AioRpcError, address: str, timeout_s: float, *, was_reached: bool) -> TandemError:
    """Converts gRPC's error of a failed handshake to WorkerLostError, UntrustedPeerError or
    IncompatibleProtocolError.

    NOTE: the refusing server has not proved its identity, so its message is not quoted; only the class that it claims
    counts.

    Args:
        was_reached: whether there was a connection; False = `error` is this side's own.
    """
    code, claimed = error.code(), _text_entries(error.trailing_metadata() or ()).get(_CLASS_KEY)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return WorkerLostError(f"{address} opened no session within {timeout_s} s")
    if not was_reached:
        return _unreached(code, error.details() or "", f"a session with {address}", address)
    return _refused_handshake(code, claimed, address)


def is_session_unknown(error: grpc.aio.AioRpcError) -> bool:
    """Whether a call was refused only because its session is unknown, so that a new session may help."""
    return _text_entries(error.trailing_metadata() or ()).get(SESSION_KEY) == UNKNOWN_SESSION


def status_of(error: BaseException) -> CallStatus:
    """Status that reports the error of a request on a shared stream."""
    return CallStatus(code_of(error).value[0], details_of(error), dict(metadata_of(error)))


def error_of_status(status: CallStatus, address: str, method: str) -> TandemError | None:
    """Inverse of `status_of`; None for success."""
    code = _BY_NUMBER.get(status.code, grpc.StatusCode.UNKNOWN)
    if code is grpc.StatusCode.OK:
        return None
    return _error_of(code, status.details, status.trailing, address, method, None)


def handshake_error_of_status(status: CallStatus, address: str) -> TandemError:
    """Like `handshake_error`, from the status of a server that was reached."""
    code = _BY_NUMBER.get(status.code, grpc.StatusCode.UNKNOWN)
    return _refused_handshake(code, status.trailing.get(_CLASS_KEY), address)


def _refused_handshake(code: grpc.StatusCode, claimed: str | None, address: str) -> TandemError:
    apart = f"this process speaks {described(SPOKEN)}. Run releases of Tandem that are at most one apart"
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return IncompatibleProtocolError(
            f"{address} opens no session: it speaks protocol {WITHOUT_SESSIONS} or is not of Tandem; {apart}"
        )
    if claimed == IncompatibleProtocolError.__name__:
        return IncompatibleProtocolError(f"{address} speaks no protocol of ours, as its log says; {apart}")
    if code in _REFUSALS or claimed == UntrustedPeerError.__name__:
        return UntrustedPeerError(
            f"{address} opens no session with this process, and its log says why; give every process the same cluster "
            "secret, and where TLS is used a certificate of its own role and deployment"
        )
    return WorkerLostError(f"{address} ended the handshake before it proved who it is ({code.name})")


def _error_of(
    code: grpc.StatusCode,
    details: str,
    trailing: Mapping[str, str],
    address: str,
    method: str,
    timeout_s: float | None,
) -> TandemError:
    kind = _CLASSES.get(trailing.get(_CLASS_KEY, ""))
    if kind is None:
        return _foreign(code, details, address, method, timeout_s)
    if issubclass(kind, CapacityError | UnavailableError):
        return kind(details, _seconds(trailing.get(_RETRY_KEY)))
    return kind(details)


def _foreign(code: grpc.StatusCode, details: str, address: str, method: str, timeout_s: float | None) -> TandemError:
    """Error for a status that gRPC itself produced."""
    where = f"{method} at {address}"
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return WorkerLostError(f"{where} did not answer within {timeout_s} s")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return CapacityError(f"{method} was refused: {details}")  # NOTE: what a gateway's client is told: no addresses
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return InvalidRequestError(f"{method} was refused: {details}")
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return UntrustedPeerError(f"{address} refused {method}: {details}; give every process the same cluster secret")
    if code is grpc.StatusCode.PERMISSION_DENIED:
        return UntrustedPeerError(
            f"{address} refused {method}: {details}; check that the address is of the process it was given for"
        )
    if code is grpc.StatusCode.UNIMPLEMENTED:
        return IncompatiblePeerError(
            f"{address} does not answer {method}; this side speaks protocol {PROTOCOL_VERSION} of tandem.rpc.v1, so "
            "that one is of another version or not what it was taken for"
        )
    if code is grpc.StatusCode.UNAVAILABLE and _STOPPING in details:
        return WorkerStoppedError(f"{where} ended: the process there has stopped")
    return _unreached(code, details, where, address)


def _unreached(code: grpc.StatusCode, details: str, where: str, address: str) -> TandemError:
    """Error for a connection that could not be opened or has ended, from gRPC's message."""
    if any(sign in details for sign in _REFUSED_TLS):
        return UntrustedPeerError(
            f"TLS with {address} failed: {details[:_MAX_REASON]}; give every process of the deployment certificates of "
            "its own role, signed by a CA in the others' ca.crt, or none to all"
        )
    if all(sign in details for sign in _CUT_OFF):
        return WorkerLostError(
            f"{address} closed the connection while it was made. If it stays so, it may not accept this process's "
            "certificate, or only one of the two uses TLS"
        )
    return WorkerLostError(f"{where} was lost ({code.name}): {details[:_MAX_REASON]}")


def _text_entries(metadata: Iterable[tuple[str, str | bytes]]) -> dict[str, str]:
    return {key: value for key, value in metadata if isinstance(value, str)}


def _seconds(text: str | None) -> float | None:
    """Parses a peer's retry time; None if it is invalid."""
    try:
        value = float(text or "nan")
    except ValueError:
        return None
    return value if 0.0 <= value < math.inf else None
