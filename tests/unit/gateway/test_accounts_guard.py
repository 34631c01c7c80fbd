"""Paths that need a key, and the places a key is read from."""

import asyncio
from typing import Any

import pytest

from tandem.accounts.accounts import Accounts
from tandem.accounts.embedded import EmbeddedAccounts
from tandem.accounts.errors import KeyRefusedError, NotAllowedError
from tandem.accounts.key import new_key
from tandem.accounts.prices import Prices
from tandem.core.clock import ManualClock
from tandem.gateway.accounts import Caller
from tandem.gateway.accounts_guard import Guard, secret_of


def scope_of(path: str, *headers: tuple[bytes, bytes]) -> dict[str, Any]:
    return {"type": "http", "path": path, "headers": list(headers)}


PLAIN, PLAIN_SECRET = new_key("plain", 1)
ADMIN, ADMIN_SECRET = new_key("admin", 1, is_admin=True)


def admitted(path: str, *headers: tuple[bytes, bytes]) -> Caller:
    async def ask() -> Caller:
        clock = ManualClock()
        accounts = Accounts(EmbeddedAccounts(None, clock), Prices(), clock)
        for key in (PLAIN, ADMIN):
            await accounts.store.add_key(key)
        try:
            return await Guard(accounts).admit(scope_of(path, *headers))
        finally:
            await accounts.close()

    return asyncio.run(ask())


@pytest.mark.parametrize("path", ["/health", "/ready", "/version", "/docs", "/openapi.json", "/", "/ping"])
def test_open_paths(path: str) -> None:
    assert admitted(path).key is None


@pytest.mark.parametrize(
    "path",
    [
        "/v1/models",
        "/v1/chat/completions",
        "/v1/no/such",
        "/tokenize",
        "/admin/requests/x",
        "/admin/workers",
        "/metrics",
    ],
)
def test_closed_paths(path: str) -> None:
    with pytest.raises(KeyRefusedError):
        admitted(path)
    assert admitted(path, (b"x-api-key", ADMIN_SECRET.encode())).key == ADMIN


@pytest.mark.parametrize("path", ["/admin/keys", "/admin/usage", "/admin/workers", "/admin/", "/metrics"])
def test_admin_paths(path: str) -> None:
    with pytest.raises(NotAllowedError):
        admitted(path, (b"x-api-key", PLAIN_SECRET.encode()))


def test_where_a_key_is_read_from() -> None:
    ours, other = f"{PLAIN_SECRET}", "token-of-someone-else"
    cases: list[tuple[list[tuple[bytes, bytes]], str | None]] = [
        ([], None),
        ([(b"authorization", f"Bearer {ours}".encode())], ours),
        ([(b"authorization", f"bearer   {ours} ".encode())], ours),
        ([(b"authorization", f"Basic {ours}".encode())], None),
        ([(b"authorization", b"Bearer")], None),
        ([(b"x-api-key", ours.encode())], ours),
        ([(b"authorization", f"Bearer {other}".encode()), (b"x-api-key", ours.encode())], ours),
        ([(b"authorization", f"Bearer {ours}".encode()), (b"x-api-key", other.encode())], ours),
        ([(b"authorization", f"Bearer {other}".encode())], other),
        ([(b"x-api-key", b"\xff\xfe")], "\xff\xfe"),
    ]
    for headers, expected in cases:
        assert secret_of(scope_of("/v1/models", *headers)) == expected
