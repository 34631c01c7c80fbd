"""A stream whose worker is silent says that it lives, in words that clients skip."""

from pathlib import Path
from typing import Any

import httpx
import pytest
from anthropic import AsyncAnthropic

from tandem.gateway import answer
from tandem.loadtest.sse import EventReader
from tests.helpers.fake_backend import MODEL, FakeCluster, sdk, tell, text_of

SAID: list[Any] = [{"role": "user", "content": "hi"}]
COMMENT, EVENT = b": ping\n\n", b'event: ping\ndata: {"type":"ping"}\n\n'
# What is asked, what pings are, and how a stream ends.
STREAMS: dict[str, tuple[dict[str, Any], bytes, bytes]] = {
    "/v1/chat/completions": ({"messages": SAID, "max_tokens": 6}, COMMENT, b"data: [DONE]\n\n"),
    "/v1/completions": ({"prompt": "hi", "max_tokens": 6}, COMMENT, b"data: [DONE]\n\n"),
    "/v1/responses": ({"input": "hi", "max_output_tokens": 6, "store": False}, COMMENT, b"}\n\n"),
    "/v1/messages": ({"messages": SAID, "max_tokens": 6}, EVENT, b'data: {"type":"message_stop"}\n\n'),
}


async def told(client: httpx.AsyncClient, path: str, cluster: FakeCluster) -> bytes:
    """All of a stream whose worker goes on once there were pings."""
    asked, ping, _ = STREAMS[path]
    body = b""
    async with client.stream("POST", path, json={"model": MODEL, "stream": True, **asked}) as response:
        assert response.status_code == 200
        async for chunk in response.aiter_raw():
            body += chunk
            if body.count(ping) >= 3:
                cluster.workers[0].go.set()
    return body


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer, "PING_S", 0.01)


@pytest.mark.parametrize("path", STREAMS)
def test_a_silent_stream_is_kept_alive(tmp_path: Path, path: str) -> None:
    """Clients and proxies gave up streams that thought unseen, or whose worker was changed."""
    _, ping, end = STREAMS[path]

    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        cluster.workers[0].hold_at = 3
        body = await told(client, path, cluster)
        assert body.count(ping) >= 3
        assert not body.startswith(ping)
        assert body.endswith(end)
        events = [frame + b"\n\n" for frame in body.split(b"\n\n")[:-1]]
        assert [event for event in events if b"ping" in event] == [ping] * body.count(ping)
        reader = EventReader()
        assert len([data for data in reader.feed(body) if b"ping" not in data]) == len(events) - body.count(ping)

    tell(tmp_path, story, num_workers=1)


def test_the_sdks_skip_them(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        worker = cluster.workers[0]
        worker.hold_at = 3
        theirs = AsyncAnthropic(
            base_url=cluster.url, api_key="none", max_retries=0, timeout=20, _strict_response_validation=True
        )
        async with sdk(cluster) as ours, theirs:
            chat = await ours.chat.completions.create(model=MODEL, messages=SAID, max_tokens=6, stream=True, seed=1)
            response = await ours.responses.create(model=MODEL, input="hi", max_output_tokens=6, stream=True)
            message = await theirs.messages.create(
                model=MODEL, messages=SAID, max_tokens=6, stream=True, extra_body={"seed": 1}
            )
            for path in STREAMS:
                worker.go.clear()
                await told(client, path, cluster)
            said = "".join([chunk.choices[0].delta.content or "" async for chunk in chat if chunk.choices])
            assert said == text_of(1, 6)
            assert [event.type async for event in response][-1] == "response.incomplete"
            assert [event.type async for event in message][-1] == "message_stop"

    tell(tmp_path, story, num_workers=1)
