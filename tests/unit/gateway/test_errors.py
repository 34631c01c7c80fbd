"""Each error has its status; what was not raised on purpose tells a client nothing."""

import pytest

from tandem.core.errors import (
    AnotherIncarnationError,
    CapacityError,
    EngineStoppedError,
    IncompatiblePeerError,
    IncompatibleProtocolError,
    InvalidRequestError,
    TandemError,
    TransportError,
    UnavailableError,
    UntrustedPeerError,
    WorkerLostError,
    WorkerStoppedError,
)
from tandem.gateway.errors import RequestError, problem_of


@pytest.mark.parametrize(
    ("error", "status", "retry_after_s"),
    [
        (InvalidRequestError("temperature=9 must be less"), 400, None),
        (RequestError("no such model", status=404), 404, None),
        (CapacityError("full"), 429, 1),
        (CapacityError("full", 0.0), 429, 1),
        (CapacityError("full", 2.01), 429, 3),
        (CapacityError("full", 5000.0), 429, 120),
        (UnavailableError("nobody", 4.0), 503, 4),
        (WorkerLostError("died"), 503, 1),
        (EngineStoppedError("stopped"), 503, 1),
        (UntrustedPeerError("secrets differ"), 503, 1),
        (IncompatibleProtocolError("1 and 7"), 503, 1),
        (TimeoutError(), 504, None),
        (TransportError("blocks"), 500, None),
        (TandemError("odd"), 500, None),
    ],
)
def test_each_error_has_its_status(error: Exception, status: int, retry_after_s: int | None) -> None:
    problem = problem_of(error)
    assert (problem.status, problem.retry_after_s) == (status, retry_after_s)
    assert problem.headers == ({} if retry_after_s is None else {"retry-after": str(retry_after_s)})


def test_a_bug_keeps_its_secrets() -> None:
    problem = problem_of(KeyError("password"))
    assert problem.status == 500
    assert "password" not in problem.message


def test_what_an_operator_must_mend_is_told_to_clients_in_general_terms() -> None:
    problem = problem_of(UntrustedPeerError("10.0.0.7:7800 refused Pair; give every process the same cluster secret"))
    assert problem.code == "cluster_misconfigured"
    assert problem.message.startswith("this cluster is wrongly configured")
    assert "10.0.0.7" not in problem.message
    assert "secret" not in problem.message


@pytest.mark.parametrize("kind", [WorkerLostError, WorkerStoppedError, AnotherIncarnationError])
def test_clients_are_not_told_which_process_was_lost(kind: type[WorkerLostError]) -> None:
    """Regression: addresses and incarnations of workers were in the answers of gateways."""
    problem = problem_of(kind("worker d0 at 10.0.0.7:7800 is incarnation 1f now, not 2e"))
    assert (problem.status, problem.code) == (503, "unavailable")
    assert "try again" in problem.message
    assert not any(name in problem.message for name in ("10.0.0.7", "1f", "d0"))


def test_clients_are_not_told_of_the_ways_between_workers() -> None:
    problem = problem_of(IncompatiblePeerError("10.0.0.7:7800 does not answer Lease"))
    assert (problem.status, problem.message) == (500, "the server failed on this request; its log says why")


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("temperature=9 must be a finite number", "temperature"),
        ("logit_bias[4]=300 must be", "logit_bias"),
        ("logit_bias names token 9", "logit_bias"),
        ("stop holds '', but", "stop"),
        ("bad_words entry has 5", "bad_words"),
        ("the prompt is too long", None),
    ],
)
def test_the_field_is_found_in_the_message(message: str, param: str | None) -> None:
    assert problem_of(InvalidRequestError(message)).param == param
