"""Errors as HTTP problems: the one mapping from `core.errors` to HTTP status and OpenAI's error type and code.

Dialects write a `Problem` in their own format. Nothing here knows a dialect's JSON.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus

from tandem.core.errors import (
    CapacityError,
    EngineStoppedError,
    IncompatibleProtocolError,
    InvalidRequestError,
    TandemError,
    TransportError,
    UnavailableError,
    UntrustedPeerError,
    WorkerLostError,
)

MAX_RETRY_AFTER_S = 120  # clients give up at once when told to wait longer
_MISCONFIGURED = (
    "this cluster is wrongly configured: its processes refuse each other, so it cannot serve the request; try another "
    "server, or again once its operators, who find the cause in its logs, have mended it"
)
_RELEASES_APART = (
    "this cluster runs releases of Tandem that cannot work together, so it cannot serve the request; try again when "
    "its operators, who find which they are in its logs, have finished or taken back their update"
)
_LOST = (
    "a process of this cluster that served the request was lost, and no other went on in time; try again, and if it "
    "stays so tell its operators, who find which process it was in its logs"
)
_FAILED = "the server failed on this request; its log says why"
# The field that an error's message begins with, as in "top_p=2 must be …"; reported as OpenAI's `param`.
_NAMED_FIELD = re.compile(r"([a-z][a-z_]*)(?:=|\[| (?:names|holds|has|is|entry|key)\b)")


class RequestError(InvalidRequestError):
    """A request refused by the gateway itself, with the fields that OpenAI's clients expect beside the message.

    Args:
        param: the field that is wrong.
        code: a machine-readable code, such as `model_not_found`.
        status: 400, or a more specific one, such as 403, 404, 408, 413 or 415.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.status = status


@dataclass(frozen=True, slots=True)
class Problem:
    """An error as reported to a client.

    Args:
        error_type: `type` in OpenAI's error object; Anthropic's follows from the status.
        code, param: as in OpenAI's error object; `param` is the wrong field.
        retry_after_s: whole seconds; None: the header is left out.
    """

    status: int
    error_type: str
    code: str
    message: str
    param: str | None = None
    retry_after_s: int | None = None

    @property
    def headers(self) -> Mapping[str, str]:
        if self.status == 408:  # or what is still to come of the body would hold the connection
            return {"connection": "close"}
        return {} if self.retry_after_s is None else {"retry-after": str(self.retry_after_s)}


def problem_of(error: BaseException) -> Problem:
    """The problem to report for `error`; details of unexpected exceptions and addresses are not disclosed."""
    if isinstance(error, InvalidRequestError):
        return _refusal(error)
    if isinstance(error, CapacityError):
        return Problem(429, "rate_limit_error", "capacity_exceeded", str(error), None, _seconds(error.retry_after_s))
    if isinstance(error, UntrustedPeerError):  # NOTE: the message is the operator's
        code, wait_s = "cluster_misconfigured", _seconds(error.retry_after_s)
        return Problem(503, "service_unavailable_error", code, _MISCONFIGURED, None, wait_s)
    if isinstance(error, IncompatibleProtocolError):  # NOTE: as above
        code, wait_s = "incompatible_releases", _seconds(error.retry_after_s)
        return Problem(503, "service_unavailable_error", code, _RELEASES_APART, None, wait_s)
    if isinstance(error, WorkerLostError):  # NOTE: as above; it names the process
        return Problem(503, "service_unavailable_error", "unavailable", _LOST, None, _seconds(error.retry_after_s))
    if isinstance(error, UnavailableError):
        return Problem(503, "service_unavailable_error", "unavailable", str(error), None, _seconds(error.retry_after_s))
    if isinstance(error, EngineStoppedError):
        return Problem(503, "service_unavailable_error", "unavailable", str(error), None, 1)
    if isinstance(error, TimeoutError):
        return Problem(504, "timeout_error", "timeout", "the request took longer than this server allows")
    if isinstance(error, TransportError):  # NOTE: as above
        return Problem(500, "server_error", "internal_error", _FAILED)
    if isinstance(error, TandemError):
        return Problem(500, "server_error", "internal_error", str(error))
    return Problem(500, "server_error", "internal_error", _FAILED)


def http_problem(status: int, path: str, method: str) -> Problem:
    """The problem for a request that matched no route or method."""
    if status == 404:
        return Problem(404, "invalid_request_error", "not_found", f"there is nothing at {path}; /docs lists what is")
    if status == 405:
        return Problem(405, "invalid_request_error", "method_not_allowed", f"{path} does not take {method}; see /docs")
    return Problem(status, "invalid_request_error", "bad_request", HTTPStatus(status).phrase)


def _refusal(error: InvalidRequestError) -> Problem:
    if isinstance(error, RequestError):
        return Problem(error.status, "invalid_request_error", error.code or "invalid_value", str(error), error.param)
    named = _NAMED_FIELD.match(str(error))
    return Problem(400, "invalid_request_error", "invalid_value", str(error), named.group(1) if named else None)


def _seconds(retry_after_s: float | None) -> int:
    return min(MAX_RETRY_AFTER_S, max(1, math.ceil(retry_after_s or 1.0)))
