"""Kinds of failed requests, as the client sees them. Results count failures by these names."""

from dataclasses import dataclass

from tandem.core.errors import UnavailableError

CONNECT = "cannot connect"
CUT = "connection cut"
TIMEOUT = "timeout"
MALFORMED = "malformed answer"
SHORT = "short answer"
CLIENT_LIMIT = "client limit"
UNFINISHED = "unfinished"  # NOTE: of a test that was stopped; counted apart

_REFUSALS = frozenset({429, 503})


class ExchangeError(UnavailableError):
    """A request without a complete answer. `kind`: one of the constants above."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Failure:
    """Reason why a request was not answered. `kind`: a constant above, or the server's status and code. `is_refusal`:
    its status was 429 or 503.
    """

    kind: str
    message: str
    is_refusal: bool = False
    retry_after_s: float | None = None


def failure_of_status(status: int, code: str, message: str, retry_after: str | None, *, has_begun: bool) -> Failure:
    """The failure for an error that the server reported: by its status, or as an event of a stream that had begun."""
    kind = f"stream {code}" if has_begun else f"http {status} {code}".rstrip()
    return Failure(kind, message, status in _REFUSALS, _seconds(retry_after))


def _seconds(text: str | None) -> float | None:
    """Seconds of a `Retry-After`. NOTE: a date is valid too, but no server sends one."""
    return float(text) if text is not None and text.isascii() and text.isdecimal() and len(text) < 6 else None
