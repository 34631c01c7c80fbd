"""One request as clients see it: real SDKs in strict mode, errors, disconnects, limits, draining."""

import asyncio
import socket
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import orjson
import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tandem.core.errors import TandemError
from tandem.gateway import http_protocol, server, serving
from tandem.telemetry import tracing
from tests.helpers.fake_backend import (
    JSON_HEAD,
    MAX_MODEL_LEN,
    MODEL,
    SAYS_JSON,
    FakeCluster,
    eventually,
    sdk,
    tell,
    text_of,
)

MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]
CHAT = {"model": MODEL, "messages": MESSAGES, "seed": 1, "max_tokens": 6}
COMPLETION = {"model": MODEL, "prompt": "abc", "seed": 1, "max_tokens": 6}


def test_requests_without_a_seed_differ_and_can_still_move(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        cluster.workers[0].fail_at = 3
        asked = {"model": MODEL, "prompt": "abc", "max_tokens": 20}
        answers = [(await client.post("/v1/completions", json=asked)).json() for _ in range(2)]
        seeds = [call.params.seed for call in cluster.workers[0].calls]
        assert seeds == [call.params.seed for call in cluster.workers[1].calls]
        assert [answer["choices"][0]["text"] for answer in answers] == [text_of(seed or 0, 20) for seed in seeds]
        assert seeds[0] != seeds[1]

    tell(tmp_path, story)


def test_what_cannot_be_honoured_is_refused_by_name(tmp_path: Path) -> None:
    image = [{"type": "image_url", "image_url": {"url": "x"}}]
    chats: list[tuple[dict[str, Any], int, str | None]] = [
        ({"tools": [{"type": "function"}]}, 400, "tools[0]"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, 400, "tools"),
        ({"tool_choice": "required"}, 400, "tool_choice"),
        ({"response_format": {"type": "yaml"}}, 400, "response_format"),
        ({"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "x"}}, 400, "structured_outputs"),
        ({"structured_outputs": {"regex": "(", "choice": ["a"]}}, 400, "structured_outputs"),
        ({"reasoning_effort": "high"}, 400, "reasoning_effort"),
        ({"guided_json": {}}, 400, "guided_json"),
        ({"messages": []}, 400, "messages"),
        ({"messages": "hi"}, 400, "messages"),
        ({"messages": [{"role": "user", "content": image}]}, 400, "messages[0].content[0]"),
        ({"messages": [{"role": "robot", "content": "x"}]}, 400, "messages[0]"),
        ({"model": "other"}, 404, "model"),
        ({"temperature": -1}, 400, "temperature"),
        ({"temperature": "hot"}, 400, "temperature"),
        ({"n": 129}, 400, "n"),
        ({"n": 9999}, 400, "n"),
        ({"top_logprobs": 2}, 400, "top_logprobs"),
        ({"max_tokens": 4, "max_completion_tokens": 5}, 400, "max_completion_tokens"),
        ({"logit_bias": {"x": 1}}, 400, "logit_bias"),
        ({"allowed_token_ids": [99999]}, 400, "allowed_token_ids"),
        ({"stream_options": {"include_usage": True}}, 400, "stream_options"),
    ]
    completions: list[tuple[dict[str, Any], int, str | None]] = [
        ({"prompt": ""}, 400, "prompt"),
        ({"prompt": []}, 400, "prompt"),
        ({"prompt": [70000]}, 400, "prompt"),
        ({"prompt": [-1]}, 400, "prompt"),
        ({"prompt": "a" * MAX_MODEL_LEN}, 400, "prompt"),
        ({"prompt": ["a"] * 300}, 400, "prompt"),
        ({"suffix": "end"}, 400, "suffix"),
        ({"max_tokens": -1}, 400, "max_tokens"),
        ({"max_tokens": 0, "min_tokens": 1}, 400, "min_tokens"),
        ({"best_of": 3}, 400, "best_of"),
    ]

    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        for path, base, cases in (
            ("/v1/chat/completions", CHAT, chats),
            ("/v1/completions", COMPLETION, completions),
        ):
            for more, status, param in cases:
                for is_stream in (False, True):
                    if is_stream and "stream_options" in more:
                        continue
                    response = await client.post(path, json={**base, "stream": is_stream, **more})
                    assert response.status_code == status, (more, response.text[:300])
                    error = response.json()["error"]
                    assert error["param"] == param, (more, error)
                    assert set(error) == {"message", "type", "param", "code"}
        assert not any(worker.calls for worker in cluster.workers)

    tell(tmp_path, story)


def test_bodies_that_are_no_request_are_refused_in_json(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        bodies: list[bytes] = [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"model": "\\ud800"}', b"[" * 5000, b"{}"]
        for content in bodies:
            response = await client.post("/v1/chat/completions", content=content, headers=SAYS_JSON)
            assert response.status_code == 400, content[:20]
            assert response.json()["error"]["type"] == "invalid_request_error"
        long = await client.post("/v1/completions", content=b"x" * 20_000, headers=SAYS_JSON)
        assert (long.status_code, long.json()["error"]["code"]) == (413, "request_too_large")

        async def chunks() -> Any:
            for _ in range(20):
                yield b"x" * 1000

        assert (await client.post("/v1/completions", content=chunks(), headers=SAYS_JSON)).status_code == 413
        assert (await client.get("/v1/chat/completions")).status_code == 405
        assert (await client.get("/v1/nothing")).json()["error"]["code"] == "not_found"
        assert (await client.get("/v1/models/other")).status_code == 404

    tell(tmp_path, story, max_body_mib=0.01)


def test_the_sdk_raises_what_happened(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        async with sdk(cluster) as api:
            with pytest.raises(openai.NotFoundError):
                await api.chat.completions.create(model="other", messages=MESSAGES)
            cluster.workers[0].fail_at = 2
            stream = await api.chat.completions.create(
                model=MODEL, messages=MESSAGES, seed=1, max_tokens=6, stream=True
            )
            with pytest.raises(openai.APIError, match="draining"):
                [chunk async for chunk in stream]

    tell(tmp_path, story, num_workers=1, max_attempts=1)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("hold_at", [0, 3])
def test_a_client_that_leaves_frees_its_worker_at_once(tmp_path: Path, is_stream: bool, hold_at: int) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        (worker,) = cluster.workers
        worker.hold_at = hold_at
        host, port = cluster.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        content = orjson.dumps({**CHAT, "n": 2, "stream": is_stream})
        head = f"POST /v1/chat/completions HTTP/1.1\r\n{JSON_HEAD}content-length: {len(content)}\r\n\r\n"
        writer.write(head.encode() + content)
        await eventually(lambda: worker.num_open == 2)
        await worker.reached.wait()
        left_s = time.monotonic()
        writer.close()
        await writer.wait_closed()
        await eventually(lambda: worker.num_open == 0)
        assert len(worker.cancelled_at_s) == 2
        assert max(worker.cancelled_at_s) - left_s < 10.0
        await eventually(lambda: cluster.gateway.gateway.admission.num_open == 0)
        await eventually(lambda: len(cluster.routers[0].settled) == 2)
        metrics = (await client.get("/metrics")).text
        assert 'finished_reason="abort",model_name="tiny"} 2.0' in metrics
        assert "tandem_gateway_disconnects_total 1.0" in metrics
        assert 'vllm:num_requests_running{engine="0",model_name="tiny"} 0.0' in metrics

    tell(tmp_path, story, num_workers=1)


def test_a_client_that_leaves_while_it_sends_leaves_nothing_behind(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        host, port = cluster.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"POST /v1/chat/completions HTTP/1.1\r\n{JSON_HEAD}content-length: 100\r\n\r\n{{".encode())
        await writer.drain()
        writer.close()
        await writer.wait_closed()
        assert (await client.get("/health")).status_code == 200
        assert not cluster.workers[0].calls

    tell(tmp_path, story)


def test_beyond_its_limit_a_gateway_says_when_to_come_back(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        worker = cluster.workers[0]
        worker.hold_at = 0
        running = asyncio.create_task(client.post("/v1/chat/completions", json=CHAT))
        await worker.reached.wait()
        refused = await client.post("/v1/chat/completions", json=CHAT)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        worker.go.set()
        assert (await running).status_code == 200
        assert (await client.post("/v1/chat/completions", json=CHAT)).status_code == 200
        metrics = (await client.get("/metrics")).text
        assert 'rejected_total{reason="capacity_exceeded"} 1.0' in metrics
        assert 'turned_away_total{reason="capacity_exceeded"} 1.0' in metrics

    tell(tmp_path, story, max_concurrent_requests=1)


def test_a_request_that_takes_too_long_is_ended_and_says_so(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        worker = cluster.workers[0]
        worker.hold_at = 0
        late = await client.post("/v1/chat/completions", json=CHAT)
        assert late.status_code == 504
        worker.hold_at = 2
        while late.status_code == 504:  # its first tokens must come in time, however slow this machine is
            cluster.gateway.gateway.request_timeout_s *= 2
            late = await client.post("/v1/chat/completions", json=CHAT | {"stream": True})
        assert '"code":"timeout"' in late.text
        assert late.text.endswith("data: [DONE]\n\n")
        await eventually(lambda: worker.num_open == 0)

    tell(tmp_path, story, request_timeout_s=0.2)


@pytest.mark.parametrize("is_stream", [True, False])
def test_time_that_is_up_after_an_answer_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_stream: bool
) -> None:
    """The bug: while a worker's stream was being closed, it was counted as a timeout and logged as a bug."""
    monkeypatch.setattr(serving, "LINGER_S", 3600.0)

    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        worker, body = cluster.workers[0], CHAT | {"stream": is_stream}
        worker.is_slow_to_leave = True
        answer, num_late = await client.post("/v1/chat/completions", json=body), 0
        while answer.status_code == 504:
            cluster.gateway.gateway.request_timeout_s *= 2
            answer, num_late = await client.post("/v1/chat/completions", json=body), num_late + 1
        await eventually(lambda: worker.num_open == 0)
        await eventually(lambda: not any(task.get_name() == "exchange" for task in asyncio.all_tasks()))
        metrics = (await client.get("/metrics")).text
        assert ('rejected_total{reason="timeout"}' in metrics) == (num_late > 0)
        assert [record for record in caplog.records if record.levelname == "ERROR"] == []

    tell(tmp_path, story, num_workers=1, request_timeout_s=0.5)


async def read_all(connection: socket.socket) -> bytes:
    """Until its end."""
    found = b""
    async with asyncio.timeout(5):
        while piece := await asyncio.get_running_loop().sock_recv(connection, 2**16):
            found += piece
    return found


def test_a_client_that_reads_nothing_is_cut_off_when_its_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_protocol, "UNREAD_S", 0.05)
    listen = server._listen

    def listen_for_little(host: str, port: int) -> socket.socket:
        listener = listen(host, port)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # which its connections inherit
        return listener

    monkeypatch.setattr(server, "_listen", listen_for_little)

    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        loop = asyncio.get_running_loop()
        cluster.workers[0].burst = 200
        content = orjson.dumps({**CHAT, "max_tokens": 4000, "stream": True, "logprobs": True, "top_logprobs": 20})
        head = f"POST /v1/chat/completions HTTP/1.1\r\n{JSON_HEAD}content-length: {len(content)}\r\n\r\n"
        host, port = cluster.url.removeprefix("http://").split(":")
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.setblocking(False)
            await loop.sock_connect(deaf, (host, int(port)))
            await loop.sock_sendall(deaf, head.encode() + content)
            await eventually(lambda: cluster.workers[0].num_open == 1)
            await eventually(lambda: not any(task.get_name() == "exchange" for task in asyncio.all_tasks()))
            assert not (await read_all(deaf)).endswith(b"0\r\n\r\n")
        metrics = (await client.get("/metrics")).text
        assert 'rejected_total{reason="timeout"} 1.0' in metrics
        assert "turned_away_total{" not in metrics

    tell(tmp_path, story, num_workers=1, request_timeout_s=1.0)


def test_ids_and_stages_come_back_in_headers_and_under_admin(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        trace = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
        response = await client.post(
            "/v1/chat/completions", json=CHAT, headers={"x-request-id": "my-id", "traceparent": trace}
        )
        assert response.headers["x-request-id"] == response.headers["request-id"] == "my-id"
        stages = {part.split(";")[0].strip() for part in response.headers["server-timing"].split(",")}
        assert stages >= {"tokenise", "pair", "queue", "prefill", "transfer"}
        found = (await client.get("/admin/requests/my-id")).json()
        assert found["state"] == "done"
        assert {stage["name"] for stage in found["stages"]} >= {"tokenise", "pair", "prefill"}
        assert (await client.get(f"/admin/requests/{response.json()['id']}")).json() == found
        bad = await client.post("/v1/chat/completions", json=CHAT, headers={"x-request-id": "a" * 129})
        assert bad.headers["x-request-id"].startswith("req-")
        assert cluster.workers[0].calls[0].request_id == "my-id"
        assert cluster.workers[0].traces == [trace, None]
        assert (await client.get("/admin/requests/unknown")).status_code == 404
        assert "request-id" in (await client.get("/nothing")).headers

    tell(tmp_path, story)


def test_spans_tell_what_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    exporter = InMemorySpanExporter()
    monkeypatch.setattr(tracing, "_otlp_exporter", lambda endpoint: exporter)

    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        (worker,) = cluster.workers
        await client.post("/v1/completions", json=COMPLETION)
        await client.post("/v1/completions", json=COMPLETION | {"temperature": -1})
        worker.fail_at, worker.failure = 2, TandemError("broken")
        await client.post("/v1/completions", json=COMPLETION)
        await client.post("/v1/completions", json=COMPLETION | {"stream": True})

    tell(tmp_path, story, num_workers=1, otlp_endpoint="http://127.0.0.1:1")
    # NOTE: in the order of the requests; a span may end after the next one's, since its client has the answer before
    spans = sorted(exporter.get_finished_spans(), key=lambda span: span.start_time or 0)
    told = []
    for span in spans:
        if span.parent is None:
            assert span.attributes is not None
            found = (span.attributes["http.response.status_code"], span.attributes.get("error.type"))
            stages = {
                one.name for one in spans if one.parent is not None and one.parent.span_id == span.context.span_id
            }
            told.append((*found, span.status.status_code.name, "pair" in stages, "tokenise" in stages))
    assert told == [
        (200, None, "UNSET", True, True),
        (400, None, "UNSET", False, True),
        (500, "TandemError", "ERROR", True, True),
        (200, "TandemError", "ERROR", True, True),
    ]


def test_a_request_is_settled_before_its_client_has_the_last_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Holds for any time that the worker takes to close its stream: the router is told without waiting for it."""
    monkeypatch.setattr(serving, "LINGER_S", 600.0)

    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        worker = cluster.workers[0]
        worker.is_slow_to_leave = True
        body, headers, states = CHAT | {"stream": True}, {"x-request-id": "my-id"}, []
        async with client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
            async for line in response.aiter_lines():
                record = cluster.gateway.gateway.history.find("my-id")
                assert record is not None
                states += [record.as_json()["state"]] * bool(line)
        assert set(states[:-2]) == {"running"}, states
        assert states[-2:] == ["done"] * 2, "the last chunk, and the end of the stream"
        found = (await client.get("/admin/requests/my-id")).json()
        assert (found["state"], found["output_tokens"], worker.num_open) == ("done", 6, 1)
        await eventually(lambda: len(cluster.routers[0].settled) == 1)
        assert worker.num_open == 1
        worker.go.set()
        await eventually(lambda: cluster.gateway.gateway.admission.num_open == 0)
        assert not worker.cancelled_at_s
        assert "tandem_gateway_disconnects_total 0.0" in (await client.get("/metrics")).text

    tell(tmp_path, story)


def test_two_live_requests_never_share_an_id(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        worker = cluster.workers[0]
        worker.hold_at = 0
        headers = {"x-request-id": "same"}
        both = [asyncio.create_task(client.post("/v1/completions", json=COMPLETION, headers=headers)) for _ in "ab"]
        await eventually(lambda: worker.num_open == 2)
        worker.go.set()
        ids = {(await answer).headers["x-request-id"] for answer in both}
        assert len(ids) == 2
        assert "same" in ids

    tell(tmp_path, story)


def test_a_stopping_gateway_finishes_its_streams_and_refuses_new_ones(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        worker = cluster.workers[0]
        worker.hold_at = 3
        running = asyncio.create_task(client.post("/v1/chat/completions", json=CHAT | {"stream": True}))
        await worker.reached.wait()
        cluster.gateway.stop()
        worker.go.set()
        assert (await running).text.endswith("data: [DONE]\n\n")
        await asyncio.wait_for(cluster.finished.wait(), 5)
        with pytest.raises(httpx.ConnectError):
            await client.get("/health")

    tell(tmp_path, story)


def test_a_stream_that_outlives_draining_ends_with_an_error(tmp_path: Path) -> None:
    async def story(cluster: FakeCluster, client: httpx.AsyncClient) -> None:
        worker = cluster.workers[0]
        worker.hold_at = 3
        running = asyncio.create_task(client.post("/v1/chat/completions", json=CHAT | {"stream": True}))
        await worker.reached.wait()
        cluster.gateway.stop()
        assert "is stopping" in (await running).text
        await asyncio.wait_for(cluster.finished.wait(), 5)
        await eventually(lambda: worker.num_open == 0)

    tell(tmp_path, story, drain_timeout_s=0.2)
