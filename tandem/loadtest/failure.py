"""Kinds of failed requests as the client sees them. Results are counted by these words."""

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
    """A request that got no whole answer. `kind`: one of the words above."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Failure:
    """Failure of a request that was not answered. `is_refusal`: before any work was done for it."""

    kind: str
    message: str
    is_refusal: bool = False
    retry_after_s: float | None = None


def failure_of_status(status: int, code: str, message: str, retry_after: str | None, *, has_begun: bool) -> Failure:
    """An error that the server told: by its status, or as an event of a stream that had begun."""
    kind = f"stream {code}" if has_begun else f"http {status} {code}".rstrip()
    return Failure(kind, message, status in _REFUSALS, _seconds(retry_after))


def _seconds(text: str | None) -> float | None:
    """NOTE: a date is legal too, and nobody sends one."""
    return float(text) if text is not None and text.isascii() and text.isdecimal() and len(text) < 6 else None
