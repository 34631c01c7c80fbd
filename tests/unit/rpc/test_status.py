"""Reading of statuses that are not from our code, and the part of an error that fits into one."""

from typing import Any

import grpc
import pytest

from tandem.core.errors import (
    CapacityError,
    IncompatiblePeerError,
    InvalidRequestError,
    TandemError,
    TransportError,
    UntrustedPeerError,
    WorkerLostError,
    WorkerStoppedError,
)
from tandem.rpc.protocols import PROTOCOL_VERSION
from tandem.rpc.status import code_of, details_of, error_from, metadata_of

Code = grpc.StatusCode


def received(code: grpc.StatusCode, *trailing: tuple[str, str], details: str = "why") -> TandemError:
    metadata: Any = grpc.aio.Metadata(*trailing)
    return error_from(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), metadata, details), "h:1", "Status", 5.0)


@pytest.mark.parametrize(
    ("code", "kind", "words"),
    [
        (Code.UNAVAILABLE, WorkerLostError, "Status at h:1 was lost"),
        (Code.CANCELLED, WorkerLostError, "h:1"),
        (Code.INTERNAL, WorkerLostError, "h:1"),
        (Code.UNKNOWN, WorkerLostError, "h:1"),
        (Code.DEADLINE_EXCEEDED, WorkerLostError, "did not answer within 5.0 s"),
        (Code.RESOURCE_EXHAUSTED, CapacityError, "Status was refused: why"),
        (Code.INVALID_ARGUMENT, InvalidRequestError, "Status was refused: why"),
        (Code.UNAUTHENTICATED, UntrustedPeerError, "why; give every process the same cluster secret"),
        (Code.PERMISSION_DENIED, UntrustedPeerError, "why; check that the address is of the process"),
        (Code.UNIMPLEMENTED, IncompatiblePeerError, f"protocol {PROTOCOL_VERSION}"),
    ],
)
def test_a_status_of_grpc_itself(code: grpc.StatusCode, kind: type[TandemError], words: str) -> None:
    error = received(code)
    assert type(error) is kind
    assert words in str(error)


def test_a_server_that_stopped_in_good_order_is_told_from_one_that_was_lost() -> None:
    """Regression: workers that Ctrl-C had stopped were "lost … Cancelling all calls"."""
    words = "GOAWAY received; Error code: 2; Debug Text: Cancelling all calls {http2_error:2, grpc_status:14}"
    error = received(Code.UNAVAILABLE, details=words)
    assert type(error) is WorkerStoppedError
    assert str(error) == "Status at h:1 ended: the process there has stopped"


def test_a_class_that_is_not_known_is_read_by_its_status() -> None:
    assert type(received(Code.ABORTED, ("tandem-error", "KeyboardInterrupt"))) is WorkerLostError
    assert type(received(Code.INVALID_ARGUMENT, ("tandem-error", "reprlib"))) is InvalidRequestError


@pytest.mark.parametrize("advice", ["", "soon", "nan", "inf", "-1", "1e999"])
def test_nonsense_is_no_advice(advice: str) -> None:
    error = received(Code.UNAVAILABLE, ("tandem-error", "CapacityError"), ("tandem-retry-after-s", advice))
    assert isinstance(error, CapacityError)
    assert error.retry_after_s is None


def test_a_class_from_elsewhere_travels_as_its_nearest_known_one() -> None:
    class SlowLinkError(TransportError):
        pass

    error = SlowLinkError("x")
    assert code_of(error) is Code.ABORTED
    assert metadata_of(error) == (("tandem-error", "TransportError"),)


def test_a_long_message_is_cut_between_characters() -> None:
    text = details_of(InvalidRequestError("☃" * 5000))
    assert set(text) == {"☃"}
    assert 1990 < len(text.encode()) <= 2000
    assert details_of(InvalidRequestError("a\ud800b")) == "a?b"


def test_what_was_not_raised_on_purpose_is_not_quoted() -> None:
    assert code_of(KeyError("key")) is Code.INTERNAL
    assert metadata_of(KeyError("key")) == ()
    assert "'key'" not in details_of(KeyError("key"))
