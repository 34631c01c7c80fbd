"""A gateway without accounts answers no page of another site, by whatever name it is called."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from tandem.gateway.browser_rules import BrowserRules
from tandem.gateway.errors import RequestError
from tests.helpers.fake_backend import MODEL, FakeCluster, tell

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}


def refusal(path: str = "/v1/models", hosts: str = "", origins: str = "", **headers: str) -> str | None:
    """The status and code with which it is refused."""
    rules = BrowserRules(hosts.split(), origins.split())
    sent = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    try:
        rules.check({"type": "http", "path": path, "headers": sent})
    except RequestError as error:
        return f"{error.status} {error.code}"
    return None


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LOCALHOST:8000",
        "localhost.",
        "a.localhost",
        "127.0.0.1:8000",
        "[::1]:8000",
        "192.168.1.7",
        "10.0.0.1",
    ],
)
def test_loopback_and_addresses_are_ours(host: str) -> None:
    assert refusal(host=host) is None


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "localhost.evil.example", "", "xlocalhost", "é"])
def test_names_that_somebody_pointed_at_us_are_not(host: str) -> None:
    assert refusal(host=host) == "403 host_not_allowed"


@pytest.mark.parametrize(
    ("hosts", "is_ours"),
    [("llm.example", True), ("*.example", True), ("*", True), ("example", False), ("*.llm.example", False)],
)
def test_names_that_are_allowed_are(hosts: str, is_ours: bool) -> None:
    assert (refusal(hosts=hosts, host="LLM.example:80") is None) == is_ours


def test_every_host_that_is_sent_must_be_ours() -> None:
    rules = BrowserRules((), ())
    with pytest.raises(RequestError, match="evil"):
        rules.check({"path": "/", "headers": [(b"host", b"localhost"), (b"host", b"evil.example")]})
    rules.check({"path": "/", "headers": []})  # as of HTTP/1.0, which no browser speaks


@pytest.mark.parametrize(
    ("host", "origin", "is_ours"),
    [
        ("localhost:8000", "http://localhost:8000", True),
        ("chat.localhost", "https://chat.localhost", True),  # a proxy ended TLS
        ("localhost:80", "http://localhost", True),
        ("localhost:8000", "http://localhost:3000", False),
        ("localhost:8000", "http://127.0.0.1:8000", False),
        ("localhost:8000", "https://evil.example", False),
        ("localhost:8000", "null", False),
        ("localhost:8000", "localhost:8000", False),
    ],
)
def test_only_our_own_pages_are_of_our_origin(host: str, origin: str, is_ours: bool) -> None:
    assert (refusal(host=host, origin=origin) is None) == is_ours


def test_an_allowed_origin_is_let_in_but_not_to_operators_paths() -> None:
    page = {"host": "localhost", "origin": "https://chat.example"}
    for origins in ("https://chat.example", "*"):
        assert refusal(origins=origins, **page) is None
        for path in ("/admin/workers", "/metrics"):
            assert refusal(path, origins=origins, **page) == "403 origin_not_allowed"
    assert refusal(origins="https://other.example", **page) == "403 origin_not_allowed"


async def sent(client: httpx.AsyncClient, path: str, **headers: str) -> dict[str, Any]:
    answer = await client.post(path, json=CHAT, headers=headers)
    assert answer.status_code == 403
    told: dict[str, Any] = answer.json()
    return told


def test_refusals_name_the_value_and_the_setting_in_the_words_of_each_api(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        rebound = (await sent(client, "/v1/chat/completions", host="evil.example:8000"))["error"]
        assert rebound["code"] == "host_not_allowed"
        assert "'evil.example:8000'" in rebound["message"]
        assert "--allowed-hosts (TANDEM_ALLOWED_HOSTS)" in rebound["message"]
        foreign = await sent(client, "/v1/messages", origin="https://evil.example")
        assert (foreign["type"], foreign["error"]["type"]) == ("error", "permission_error")
        assert "'https://evil.example'" in foreign["error"]["message"]
        assert "--allowed-origins (TANDEM_ALLOWED_ORIGINS)" in foreign["error"]["message"]
        for path in ("/", "/metrics", "/admin/workers", "/openapi.json"):
            assert (await client.get(path, headers={"host": "evil.example"})).status_code == 403
        assert not any(worker.calls for worker in cluster.workers)

    tell(tmp_path, story)


def test_hosts_can_be_allowed_and_with_accounts_need_not_be(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        answer = await client.get("/health", headers={"host": "llm.example"})
        assert answer.status_code == 200

    tell(tmp_path, story, allowed_hosts="llm.example,*.lan")
    tell(tmp_path, story, accounts=str(tmp_path / "accounts.db"))
