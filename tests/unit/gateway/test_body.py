"""A body that does not come holds nobody else up."""

import asyncio
from pathlib import Path

import httpx
import pytest
from starlette.types import Message

from tandem.gateway import body
from tandem.gateway.body import read_body
from tandem.gateway.errors import RequestError
from tests.helpers.fake_backend import MODEL, FakeCluster, tell

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
READERS = ("/tokenize", "/v1/messages/count_tokens", "/v1/responses/input_tokens", "/v1/chat/completions")


async def begun_upload(cluster: FakeCluster, path: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A request whose body is waited for."""
    url = httpx.URL(cluster.url)
    reader, writer = await asyncio.open_connection(url.host, url.port)
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\nexpect: 100-continue\r\n\r\n"
    writer.write(head.encode())
    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    return reader, writer


@pytest.mark.parametrize("path", READERS)
def test_an_upload_takes_no_place(tmp_path: Path, path: str) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        uploads = [await begun_upload(cluster, path) for _ in range(2)]
        assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200
        for _, writer in uploads:
            writer.close()

    tell(tmp_path, story, max_concurrent_requests=2)


@pytest.mark.parametrize("path", READERS)
def test_an_upload_that_does_not_end_is_refused(tmp_path: Path, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        monkeypatch.setattr(body, "BODY_TIMEOUT_S", 0.05)
        reader, writer = await begun_upload(cluster, path)
        answer = await asyncio.wait_for(reader.read(), 10)
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"within 0.05 s" in answer
        writer.close()

    tell(tmp_path, story)


def test_pieces_that_keep_coming_do_not_put_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    async def receive() -> Message:
        await asyncio.sleep(0)
        return {"type": "http.request", "body": b"", "more_body": True}

    monkeypatch.setattr(body, "BODY_TIMEOUT_S", 0.05)
    with pytest.raises(RequestError, match="did not come to its end") as refusal:
        asyncio.run(read_body(receive, None, 100))
    assert refusal.value.status == 408
