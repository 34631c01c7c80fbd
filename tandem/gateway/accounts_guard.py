"""Checks the API key that a path requires. Invariant: decided before a body is read. Pages and health need no key."""

from starlette.types import Scope

from tandem.accounts.accounts import Accounts
from tandem.accounts.errors import NotAllowedError
from tandem.accounts.key import PREFIX
from tandem.gateway.accounts import Caller
from tandem.gateway.operator_port import METRICS, check_port, is_operator_path, is_operator_port

# These need a key: whole paths, and what lies below those that end with a slash.
_CLOSED = ("/v1/", "/admin/", METRICS, "/tokenize", "/detokenize", "/tokenizer_info")


class Guard:
    """Admits requests to a gateway with accounts."""

    def __init__(self, accounts: Accounts) -> None:
        self._accounts = accounts

    async def admit(self, scope: Scope) -> Caller:
        """Returns the caller of a request.

        Raises:
            KeyRefusedError, NotAllowedError: the key is missing or unknown, or may not use this path.
            RequestError: this port does not serve the path.
            AccountsUnavailableError: the account store cannot be asked.
        """
        path: str = scope["path"]
        check_port(scope)
        if not _needs_key(path) or (path == METRICS and is_operator_port(scope)):
            return Caller()
        key = await self._accounts.authenticate(secret_of(scope))
        if is_operator_path(path) and not key.is_admin:
            raise NotAllowedError(f"{path[:128]} needs an admin key (`tandem keys create --admin`)")
        return Caller(key, self._accounts)


def secret_of(scope: Scope) -> str | None:
    """The API key of a request, from either header. One with our prefix wins over other tokens."""
    found: dict[bytes, str] = {}
    for name, value in scope["headers"]:
        if name in (b"authorization", b"x-api-key"):
            found.setdefault(name, value.decode("latin-1").strip())
    scheme, _, bearer = found.get(b"authorization", "").partition(" ")
    given = [bearer.strip() if scheme.lower() == "bearer" else "", found.get(b"x-api-key", "")]
    return next((secret for secret in given if secret.startswith(PREFIX)), given[0] or given[1] or None)


def _needs_key(path: str) -> bool:
    return any(path.startswith(closed) if closed.endswith("/") else path == closed for closed in _CLOSED)
