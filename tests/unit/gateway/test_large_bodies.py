"""Bodies made of very many values: refused before they are parsed, and parsed in a thread where they are large."""

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from tandem.accounts.key import new_key
from tandem.gateway import parse
from tandem.gateway.limits import MAX_FREE_VALUES, MAX_SCHEMA_VALUES
from tandem.gateway.off_loop import LARGE_BYTES
from tests.helpers.fake_backend import MODEL, SAYS_JSON, FakeCluster, eventually, tell

CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}
PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "/tokenize")


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """(Length, whether on the event loop's thread) of each text that was parsed."""
    seen: list[tuple[int, bool]] = []
    loads = orjson.loads

    class Watched:
        JSONDecodeError = orjson.JSONDecodeError

        @staticmethod
        def loads(text: bytes) -> Any:
            seen.append((len(text), threading.current_thread() is threading.main_thread()))
            return loads(text)

    monkeypatch.setattr(parse, "orjson", Watched)
    return seen


def test_large_bodies_are_never_parsed_on_the_event_loop(tmp_path: Path, parsed: list[tuple[int, bool]]) -> None:
    """Two bodies of 26 MiB with 2.2 million members held every stream up for nine seconds."""

    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        for path in PATHS:
            for body in (CHAT, CHAT | {"sparkle": "x" * LARGE_BYTES}):
                await client.post(path, json=body)
        assert len(parsed) == 2 * len(PATHS)
        for num_bytes, is_on_loop in parsed:
            assert is_on_loop == (num_bytes <= LARGE_BYTES)

    tell(tmp_path, story)


@pytest.mark.parametrize("path", PATHS)
def test_too_many_values_are_refused_before_they_are_parsed(
    tmp_path: Path, path: str, parsed: list[tuple[int, bool]]
) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        members = json.dumps({f"k{i}": 0 for i in range(600)})
        many = {members: "--max-body-members", "[" + "[]," * 501: "--max-body-members", "[" + "0," * 2100: "-values"}
        for value, setting in many.items():
            raw = f'{{"model": "{MODEL}", "chat_template_kwargs": {value}}}'
            refused = await client.post(path, content=raw, headers=SAYS_JSON)
            assert refused.status_code == 413
            assert setting in refused.json()["error"]["message"]
            assert ("request_id" in refused.json()) == path.startswith("/v1/messages")
        text = ", ".join(['{"a": [1, 2]}'] * 2000)  # in a string they are no values
        await client.post(path, json=CHAT | {"sparkle": text})
        assert len(parsed) == 1
        assert cluster.gateway.gateway.bodies.num_held_bytes == 0

    tell(tmp_path, story, max_body_values=2000, max_body_members=500)


@pytest.mark.parametrize("name", ["chat_template_kwargs", "metadata", "tools"])
def test_what_has_no_names_of_ours_is_bounded(tmp_path: Path, name: str) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        for num_values, status in ((MAX_FREE_VALUES - 1, 200), (MAX_FREE_VALUES + 1, 400)):
            value: Any = {"a": [0] * (num_values - 1)}
            if name == "tools":
                schema = {"enum": [0] * (num_values - MAX_FREE_VALUES + MAX_SCHEMA_VALUES - 1)}
                value = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
            answer = await client.post("/v1/chat/completions", json=CHAT | {name: value, "tool_choice": "none"})
            assert answer.status_code == status, answer.text[:300]
            if status == 400:
                assert f"more than {MAX_SCHEMA_VALUES if name == 'tools' else MAX_FREE_VALUES} values" in answer.text

    tell(tmp_path, story, num_workers=1)


async def upload(cluster: FakeCluster, secret: str, entries: int) -> asyncio.StreamWriter:
    """A body of so many numbers that does not end."""
    url = httpx.URL(cluster.url)
    _, writer = await asyncio.open_connection(url.host, url.port)
    head = f"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nx-api-key: {secret}\r\n"
    writer.write(f"{head}content-length: 10000000\r\n\r\n".encode() + b'{"a":[' + b"1," * entries)
    await writer.drain()
    return writer


def test_a_keys_bodies_are_charged_to_it_before_they_are_parsed(tmp_path: Path) -> None:
    """Six bodies of 29 MiB took 1.5 GiB, since what parsing makes of them was not counted."""

    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        bodies, accounts = cluster.gateway.gateway.bodies, cluster.gateway.gateway.accounts
        assert accounts is not None
        (greedy, greedy_secret), (other, other_secret) = new_key("greedy", 1), new_key("other", 1)
        for key in (greedy, other):
            await accounts.store.add_key(key)
        bodies.max_key_bytes = 10 * 2**20
        uploads = [await upload(cluster, greedy_secret, 70_000) for _ in range(2)]
        each = 70_000 * (2 + 64)  # two bytes of text and what an entry takes
        await eventually(lambda: bodies.num_key_bytes[greedy.key_id] > 2 * each - 2 * LARGE_BYTES)
        assert bodies.num_held_bytes == bodies.num_key_bytes[greedy.key_id] < 2 * each
        raw = b'{"prompt":' + b" " * 300_000 + b'"x","a":[' + b"1," * 70_000 + b"1]}"
        refused = await client.post("/tokenize", content=raw, headers=SAYS_JSON | {"x-api-key": greedy_secret})
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert "this API key" in refused.json()["error"]["message"]
        served = await client.post("/tokenize", content=raw, headers=SAYS_JSON | {"x-api-key": other_secret})
        assert served.status_code == 400  # for its field a, once it was read
        for writer in uploads:
            writer.close()
        await eventually(lambda: not bodies.num_key_bytes and bodies.num_held_bytes == 0)

    tell(tmp_path, story, accounts=str(tmp_path / "accounts.db"))
