"""Errors of the Kubernetes API; each message names verb, resource and namespace, and the remedy.

TandemError
└── KubeError                   any of the below; `call` says what was asked
    ├── KubeUnavailableError    the server is away, slow or overloaded; asking again later can help
    ├── UnauthorizedError       401: the server does not know who we are
    ├── ForbiddenError          403: it does, and a rule is missing (named)
    ├── NotFoundError           404
    ├── ConflictError           409: another client wrote first; read again
    ├── ExpiredError            410: that version of the list is gone; list again
    ├── RefusedError            any other refusal; the same call cannot succeed
    └── BadAnswerError          what came back is not what the API says
"""

from collections.abc import Mapping
from typing import Any

from tandem.core.errors import TandemError, shown
from tandem.kube.call import KubeCall


class KubeError(TandemError):
    """A call to the Kubernetes API that failed."""

    def __init__(self, call: KubeCall, reason: str, retry_after_s: float | None = None) -> None:
        super().__init__(f"Kubernetes: {call}: {reason}")
        self.call = call
        self.retry_after_s = retry_after_s


class KubeUnavailableError(KubeError):
    """The server did not answer, or reported that it cannot answer now."""


class UnauthorizedError(KubeError):
    """The credentials are missing, wrong or out of date."""


class ForbiddenError(KubeError):
    """The account's Role lacks a rule."""


class NotFoundError(KubeError):
    """The object, its namespace or its kind does not exist."""


class ConflictError(KubeError):
    """The object was changed by another client, or exists already."""


class ExpiredError(KubeError):
    """The server no longer has this resource version."""


class RefusedError(KubeError):
    """The server understood the call and refused it."""


class BadAnswerError(KubeError):
    """The answer is not what this call returns: probably this is no Kubernetes API server."""


_KINDS: Mapping[int, tuple[type[KubeError], str]] = {
    404: (NotFoundError, "check the name and the namespace"),
    409: (ConflictError, "another client wrote first; read it again"),
    410: (ExpiredError, "list again"),
}


def error_of(call: KubeCall, code: int, status: Mapping[str, Any], retry_after_s: float | None = None) -> KubeError:
    """The error for an HTTP status of 400 or more.

    Args:
        status: the `Status` object that came with it, or nothing.
        retry_after_s: of the `Retry-After` header.
    """
    message = status.get("message")
    answer = f"{code}, {shown(message)}" if isinstance(message, str) and message else f"{code}"
    if code == 401:
        return UnauthorizedError(call, f"{answer}; check the token of the service account or kubeconfig", retry_after_s)
    if code == 403:
        return ForbiddenError(call, f"{answer}; {_missing_rule(call)}", retry_after_s)
    if code == 429 or code >= 500:
        return KubeUnavailableError(call, f"the server cannot answer now ({answer}); try again later", retry_after_s)
    kind, remedy = _KINDS.get(code, (RefusedError, "correct the call"))
    return kind(call, f"{answer}; {remedy}", retry_after_s)


def _missing_rule(call: KubeCall) -> str:
    verbs = "get, list, watch" if call.verb in ("list", "watch") else call.verb
    named = f" (resourceNames, where given, with {call.name!r})" if call.name and call.verb != "create" else ""
    return (
        f"give the account a Role in namespace {call.namespace} with apiGroups: [{call.group!r}],"
        f" resources: [{call.resource!r}]{named}, verbs: [{verbs}]"
    )
