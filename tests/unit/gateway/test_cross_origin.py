"""Web pages of other origins: those that are allowed may ask and read the answers, others may not."""

import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tandem.accounts.key import new_key
from tests.helpers.fake_backend import MODEL, FakeCluster, tell

PATH = "/v1/chat/completions"
BODY: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "seed": 1, "max_tokens": 6}
PAGE, OTHER = "https://chat.example", "https://elsewhere.example"
ALLOWED = "access-control-allow-origin"


async def preflight(client: httpx.AsyncClient, origin: str, path: str = PATH) -> httpx.Response:
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    return await client.options(path, headers={"origin": origin, **asked})


def test_pages_of_other_origins_are_told_nothing_unless_they_are_allowed(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        refused = await preflight(client, PAGE)
        assert refused.status_code == 403
        answered = await client.post(PATH, json=BODY, headers={"origin": PAGE})
        assert answered.status_code == 403
        assert not any(worker.calls for worker in cluster.workers)
        for answer in (refused, answered):
            assert not [name for name in answer.headers if name.startswith("access-control")]

    tell(tmp_path, story)


@pytest.mark.parametrize("origins", [f"{PAGE},http://localhost:3000", "*"])
def test_allowed_pages_may_ask_and_read(tmp_path: Path, origins: str) -> None:
    """Browsers ask before they send a key, and had a 405 without a word of who may."""
    shown = PAGE if origins != "*" else "*"

    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        asked = await preflight(client, PAGE)
        assert (asked.status_code, asked.headers[ALLOWED]) == (200, shown)
        assert "POST" in asked.headers["access-control-allow-methods"]
        assert asked.headers["access-control-allow-headers"] == "authorization,content-type"
        answered = await client.post(PATH, json=BODY, headers={"origin": PAGE})
        missing = await client.get("/v1/none", headers={"origin": PAGE})
        for answer, status in ((answered, 200), (missing, 404)):
            assert (answer.status_code, answer.headers[ALLOWED]) == (status, shown)
            assert answer.headers["access-control-expose-headers"] == "*"
            assert "access-control-allow-credentials" not in answer.headers
        closed = await client.get("/admin/workers", headers={"origin": PAGE})
        assert (closed.status_code, ALLOWED in closed.headers) == (403, False)
        assert (await preflight(client, PAGE, "/admin/workers")).status_code == 403

    tell(tmp_path, story, allowed_origins=origins)


def test_other_pages_may_not(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        asked = await preflight(client, OTHER)
        answered = await client.post(PATH, json=BODY, headers={"origin": OTHER})
        assert (asked.status_code, answered.status_code) == (400, 403)
        assert ALLOWED not in {**asked.headers, **answered.headers}

    tell(tmp_path, story, allowed_origins=PAGE)


def test_browsers_ask_without_the_key_that_the_page_then_sends(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        accounts = cluster.gateway.gateway.accounts
        assert accounts is not None
        key, secret = new_key("page", int(time.time()))
        await accounts.store.add_key(key)
        assert (await preflight(client, PAGE)).status_code == 200
        refused = await client.post(PATH, json=BODY, headers={"origin": PAGE})
        assert (refused.status_code, refused.headers[ALLOWED]) == (401, PAGE)
        with_key = {"origin": PAGE, "authorization": f"Bearer {secret}"}
        answered = await client.post(PATH, json=BODY, headers=with_key)
        assert (answered.status_code, answered.headers[ALLOWED]) == (200, PAGE)

    tell(tmp_path, story, allowed_origins=PAGE, accounts=str(tmp_path / "accounts.db"))


def test_streams_arrive_as_they_are_written(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        (worker,) = cluster.workers
        worker.hold_at = 2
        headers = {"origin": PAGE}
        async with client.stream("POST", PATH, json=BODY | {"stream": True}, headers=headers) as answer:
            assert answer.headers[ALLOWED] == PAGE
            async for line in answer.aiter_lines():
                if '"content":""' not in line and '"content":' in line:
                    worker.go.set()  # which nothing would, were the text held back until the end
        assert worker.go.is_set()

    tell(tmp_path, story, num_workers=1, allowed_origins=PAGE)
