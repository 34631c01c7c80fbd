"""JSON is taken from those who say that it is; browsers ask before they say so to another site."""

import asyncio
import json
from pathlib import Path

import httpx
import pytest

from tandem.accounts.key import new_key
from tests.helpers.fake_backend import JSON_HEAD, MODEL, FakeCluster, tell

BODY = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "input": "x", "prompt": "x"}
READERS = {
    "/v1/chat/completions": "messages",
    "/v1/completions": "prompt",
    "/v1/messages": "messages",
    "/v1/messages/count_tokens": "messages",
    "/v1/responses": "input",
    "/v1/responses/input_tokens": "input",
    "/tokenize": "messages",
}


@pytest.mark.parametrize("accounts", [False, True], ids=["open", "with keys"])
def test_what_browsers_send_unasked_is_refused(tmp_path: Path, accounts: bool) -> None:
    """A page of any site could have a laptop's gateway generate, by a POST of plain text."""

    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        if accounts:
            client.headers["authorization"] = f"Bearer {await new_secret(cluster)}"
        unasked = (
            "text/plain",
            "text/plain;charset=UTF-8",
            "application/x-www-form-urlencoded",
            None,
            "application/jsonx",
        )
        for path, field in READERS.items():
            raw = json.dumps({"model": MODEL, field: BODY[field]}).encode()
            for kind in unasked:
                answer = await client.post(path, content=raw, headers={} if kind is None else {"content-type": kind})
                assert answer.status_code == 415, (path, kind)
                error = answer.json()["error"]
                assert (kind or "no content-type") in error["message"]
                assert "application/json" in error["message"]
                assert ("request_id" in answer.json()) == path.startswith("/v1/messages")
        assert not any(worker.calls for worker in cluster.workers)

    tell(tmp_path, story, **({"accounts": str(tmp_path / "a.db")} if accounts else {}))


async def new_secret(cluster: FakeCluster) -> str:
    key, secret = new_key("sender", 1)
    assert cluster.gateway.gateway.accounts is not None
    await cluster.gateway.gateway.accounts.store.add_key(key)
    return secret


def test_json_is_taken_with_parameters_and_as_a_kind_of_json(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        raw = json.dumps({"model": MODEL, "prompt": "x"}).encode()
        for kind in ("application/json", "Application/JSON; charset=utf-8", "application/vnd.api+json"):
            answer = await client.post("/tokenize", content=raw, headers={"content-type": kind})
            assert answer.status_code == 200, kind
        assert (await client.post("/ping")).status_code == 200  # which reads no body

    tell(tmp_path, story)


def test_codings_that_are_not_read_are_refused_by_name(tmp_path: Path) -> None:
    """Regression: a compressed body was invalid JSON, and a compressed transfer was read as if it were none."""

    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        raw = json.dumps({"model": MODEL, "prompt": "x"}).encode()
        as_json = {"content-type": "application/json"}
        for coding in ("gzip", "br", "identity, gzip"):
            answer = await client.post("/tokenize", content=raw, headers={**as_json, "content-encoding": coding})
            assert (answer.status_code, coding in answer.json()["error"]["message"]) == (415, True)
            assert "content-encoding" in answer.json()["error"]["message"]
        answer = await client.post("/tokenize", content=raw, headers={**as_json, "content-encoding": "identity"})
        assert answer.status_code == 200
        url = httpx.URL(cluster.url)
        for coding, status in ("gzip, chunked", 501), ("chunked", 200):
            reader, writer = await asyncio.open_connection(url.host, url.port)
            head = f"POST /tokenize HTTP/1.1\r\n{JSON_HEAD}transfer-encoding: {coding}\r\n\r\n"
            writer.write(head.encode() + b"%x\r\n%b\r\n0\r\n\r\n" % (len(raw), raw))
            writer.write_eof()
            said = (await reader.read()).decode()
            writer.close()
            assert f"HTTP/1.1 {status} " in said
            assert status == 200 or "transfer-encoding='gzip, chunked'" in said

    tell(tmp_path, story)
