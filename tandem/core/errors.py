"""Every error Tandem raises on purpose. The rule: `assert` = we have a bug; `raise` = someone else sent this.

Each message names the offending value and the remedy. gRPC and HTTP statuses are mapped from these classes once each.

    TandemError
    ├── InvalidRequestError         the caller's request is wrong; retrying it unchanged cannot help
    ├── ConfigurationError          a flag, variable or combination of settings cannot be honoured
    ├── CheckpointError             a model directory cannot be served
    │   ├── CorruptCheckpointError      its bytes are damaged, missing or contradict each other
    │   └── UnsupportedCheckpointError  it is well-formed, but we would not serve it exactly
    ├── CapacityError               a bounded queue or pool is full; retrying later can help
    │   └── NoRoomError                 every worker's KV cache is promised away; room comes as requests end
    ├── EngineStoppedError          the engine has stopped or failed; no request can be served by it
    │   └── RanksLostError              a rank is lost; the engine goes on once its group is formed anew
    ├── UnavailableError            no worker can serve this now; another worker or a later try can help
    │   ├── WorkerLostError             the process at the other end died, went silent or answered nonsense
    │   │   ├── AnotherIncarnationError     it was started again since the caller learned of it
    │   │   └── WorkerStoppedError          it stopped in good order, as on SIGTERM
    │   ├── UnknownPromptError          a call names a prefix of its prompt that is not kept; send the whole prompt
    │   ├── IncompatibleProtocolError   the process at the other end is of a release that this one cannot talk to
    │   └── UntrustedPeerError          one of two processes does not accept the other's secret, role or address
    ├── LocalityUnavailableError    the locality index cannot be reached; serve without its hints
    └── TransportError              KV blocks could not be moved between two workers
        └── IncompatiblePeerError       the two must never exchange blocks; both sides' values are named
"""

import re
import reprlib

_MAX_SHOWN_CHARACTERS = 120  # of a value quoted in a message


class TandemError(Exception):
    """Base of every error raised on purpose."""


class InvalidRequestError(TandemError):
    """The request itself is wrong: the message names the field, its value and what is accepted."""


class ConfigurationError(TandemError):
    """A setting cannot be honoured: the message names it, its value and what is accepted."""


class CheckpointError(TandemError):
    """A model directory cannot be served."""


class CorruptCheckpointError(CheckpointError):
    """A checkpoint's files are damaged, missing or contradict each other."""


class UnsupportedCheckpointError(CheckpointError):
    """A checkpoint asks for something Tandem would not serve exactly; the message says what is supported."""


class CapacityError(TandemError):
    """A bounded queue or pool is full; the same request can succeed later, best after `retry_after_s`."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NoRoomError(CapacityError):
    """The KV cache of every worker that could serve this is promised to other requests; waiting in the queue helps."""


class EngineStoppedError(TandemError):
    """The engine has stopped or failed; the message carries the cause."""


class RanksLostError(EngineStoppedError):
    """A rank of the engine's group is lost, and with it the step; the message names rank and step."""


class UnavailableError(TandemError):
    """No worker can serve this now: there is none, or those that exist are draining."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class WorkerLostError(UnavailableError):
    """A process died, went silent or answered nonsense; the message names it. Another one can go on."""


class WorkerStoppedError(WorkerLostError):
    """A process was shut down cleanly; another one can continue."""


class AnotherIncarnationError(WorkerLostError):
    """The process was restarted since the caller learned of it; the message names both incarnations."""


class UnknownPromptError(UnavailableError):
    """A call names a prefix of its prompt, and the process that is called does not keep it (any more)."""


class IncompatibleProtocolError(UnavailableError):
    """Two processes have no protocol in common: the message names what each speaks."""


class UntrustedPeerError(UnavailableError):
    """One of two processes does not accept the other: the message names what differs and how an operator mends it.

    NOTE: for logs; clients of a gateway are told only that the cluster is wrongly configured.
    """


class LocalityUnavailableError(TandemError):
    """The locality index did not answer in time or answered nonsense: go on without hints, and try again later."""


def shown(value: object) -> str:
    """Returns `value` for quotation in a message: like `repr`, but short and safe for any input."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = _MAX_SHOWN_CHARACTERS
    try:
        return short.repr(value)[: 2 * _MAX_SHOWN_CHARACTERS]
    except ValueError:  # an integer of more digits than Python will write
        return f"a very large {type(value).__name__}"


def without_password(url: str) -> str:
    """Returns `url` for quotation in a message: without user name and password, the part up to its last @."""
    return re.sub(r"^([a-z][a-z0-9+.-]*://)?.*@", r"\1", url, flags=re.IGNORECASE | re.DOTALL)


class TransportError(TandemError):
    """KV blocks could not be moved: the message names the peer and the cause. Recomputing or another peer can help."""


class IncompatiblePeerError(TransportError):
    """A peer whose blocks mean something else here, or whose card cannot be trusted; trying again cannot help."""
