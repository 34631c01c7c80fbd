"""`/metrics` and `/admin/` are for operators: on a port of their own, for an admin's key, or on loopback."""

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from tandem.accounts.key import new_key
from tandem.core.errors import ConfigurationError
from tandem.process.settings import check_anonymous
from tests.helpers.fake_backend import MODEL, FakeCluster, tell

OPERATORS = ("/metrics", "/admin/workers", "/admin/decisions", "/admin/overview")
COMPLETION = {"model": MODEL, "prompt": "abc", "max_tokens": 2}


@asynccontextmanager
async def operator(cluster: FakeCluster) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the operators' port."""
    assert cluster.gateway.admin_url is not None
    async with httpx.AsyncClient(base_url=cluster.gateway.admin_url, timeout=20, verify=False) as client:
        yield client


def test_with_a_port_of_their_own_the_public_one_does_not_answer_them(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        async with operator(cluster) as inside:
            done = await client.post("/v1/completions", json=COMPLETION)
            for path in OPERATORS:
                refused = await client.get(path)
                assert refused.status_code == 403, path
                assert "--admin-bind" in refused.json()["error"]["message"]
                assert (await inside.get(path)).status_code == 200, path
            for each in (client, inside):
                assert (await each.get(f"/admin/requests/{done.headers['x-request-id']}")).status_code == 200
                assert (await each.get("/health")).status_code == 200
                assert (await each.get("/operations")).status_code == 200
                assert (await each.get("/trace")).status_code == 200
            for path in ("/v1/completions", "/tokenize"):
                wrong = await inside.post(path, json=COMPLETION)
                assert (wrong.status_code, "--port" in wrong.json()["error"]["message"]) == (404, True)
            assert (await inside.get("/metrics", headers={"host": "evil.example"})).status_code == 403

    tell(tmp_path, story, admin_bind="127.0.0.1:0")


def test_a_gateway_of_others_too_answers_them_to_nobody_without_such_a_port(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        async with httpx.AsyncClient(base_url=cluster.url.replace("0.0.0.0", "127.0.0.1"), verify=False) as here:
            for path in OPERATORS:
                assert (await here.get(path)).status_code == 403
            assert (await here.get("/v1/models")).status_code == 200

    tell(tmp_path, story, host="0.0.0.0", allow_anonymous=True)


def test_on_loopback_alone_they_stay_where_they_were(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        assert cluster.gateway.admin_url is None
        for path in OPERATORS:
            assert (await client.get(path)).status_code == 200

    tell(tmp_path, story)


def test_with_accounts_they_are_for_an_admin_but_metrics_on_their_port_for_a_scraper(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        accounts = cluster.gateway.gateway.accounts
        assert accounts is not None
        (plain, plain_secret), (admin, admin_secret) = new_key("plain", 1), new_key("admin", 1, is_admin=True)
        for key in (plain, admin):
            await accounts.store.add_key(key)
        async with operator(cluster) as inside:
            for path in OPERATORS:
                assert (await client.get(path)).status_code == 401
                assert (await client.get(path, headers={"x-api-key": plain_secret})).status_code == 403
                for each in (client, inside):
                    assert (await each.get(path, headers={"x-api-key": admin_secret})).status_code == 200
            assert (await inside.get("/metrics")).status_code == 200
            for path in ("/admin/workers", "/admin/keys", "/admin/requests/x"):
                assert (await inside.get(path)).status_code == 401

    tell(tmp_path, story, accounts=str(tmp_path / "accounts.db"), admin_bind="127.0.0.1:0")


def test_an_address_that_is_taken_is_named(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None: ...

    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigurationError, match=f"cannot listen at {address}.*--admin-bind"):
            tell(tmp_path, story, admin_bind=address)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.7", "llm.example", ""])
def test_a_gateway_beyond_loopback_without_keys_must_be_asked_for(host: str) -> None:
    with pytest.raises(ConfigurationError, match=r"--accounts.*--allow-anonymous"):
        check_anonymous(host, has_accounts=False, is_allowed=False)
    check_anonymous(host, has_accounts=False, is_allowed=True)
    check_anonymous(host, has_accounts=True, is_allowed=False)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "[::1]", "localhost"])
def test_on_loopback_nothing_has_to_be_said(host: str) -> None:
    check_anonymous(host, has_accounts=False, is_allowed=False)
