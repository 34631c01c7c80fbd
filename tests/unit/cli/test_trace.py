import asyncio
import http.server
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tandem.cli.main import main
from tandem.core.draft_counts import DraftCounts
from tandem.gateway.prompt_encoder import EncodingCounts
from tandem.worker.stopwatch import draft_attributes

REQUEST: dict[str, Any] = {
    "request_id": "req-1",
    "model": "demo",
    "state": "finished",
    "ttft_s": 0.05,
    "duration_s": 0.1,
    "prompt_tokens": 40,
    "cached_tokens": 32,
    "output_tokens": 8,
    "workers": ["prefill-0", "decode-0"],
    "stages": [
        {
            "name": "decode",
            "process": "decode-0",
            "start_s": 100.05,
            "duration_s": 0.05,
            "attributes": {"num_tokens": 7},
        },
        {
            "name": "pair",
            "process": "router",
            "start_s": 100.0,
            "duration_s": 0.001,
            "attributes": {"policy": "cost", "decision_ms": 0.6, "predicted_queue_ms": 0.0},
        },
        {
            "name": "transfer",
            "process": "decode-0",
            "start_s": 100.01,
            "duration_s": 0.002,
            "attributes": {"num_bytes": 4 << 20, "num_blocks": 4, "source": "prefill-0"},
        },
        {"name": "first token", "process": "prefill-0", "start_s": 100.05, "duration_s": 0.0, "attributes": {}},
    ],
}
Serve = Callable[[dict[str, tuple[int, bytes]]], str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Starts an HTTP server of fixed answers; returns its address."""
    stops: list[Callable[[], None]] = []

    def start(answers: dict[str, tuple[int, bytes]]) -> str:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status, body = answers.get(self.path, (404, b"{}"))
                if self.path.endswith("/closed") and self.headers["authorization"] != "Bearer sk-tandem-1":
                    status, body = 401, b"{}"
                self.send_response(status)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                """Nothing."""

        server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        stops.extend([server.shutdown, thread.join, server.server_close])
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for stop in stops:
        stop()


def test_ranks_of_its_workers_are_told_where_they_may_be_known(
    serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    """A worker of one process has none; who may not ask for workers gets the timeline alone."""
    member = {"part": 0, "num_parts": 2, "stage": None, "context": None}
    members = [
        {**member, "rank": 0, "pid": 70, "host": None, "silent_s": 0.0},
        {**member, "rank": 1, "pid": 12, "host": "host 1 (10.0.0.7)", "silent_s": 0.25, "part": 1},
    ]
    ranks = {"num_epochs": 2, "members": members}
    workers = [{"worker_id": "prefill-0", "ranks": None}, {"worker_id": "decode-0", "ranks": ranks}]
    found = {"/admin/requests/req-1": (200, json.dumps(REQUEST).encode())}
    url = serve(found | {"/admin/workers": (200, json.dumps({"workers": workers}).encode())})
    assert main(["trace", "req-1", "--url", url]) == 0
    assert capsys.readouterr().out.splitlines()[-3:] == [
        "decode-0 is 2 ranks on 2 hosts now, formed 2 times:",
        "  rank 0: process 70, heads 1 of 2, leads",
        "  rank 1: process 12, host 1 (10.0.0.7), heads 2 of 2, heard 0.2 s ago",
    ]
    for status, body in (
        (403, b"{}"),
        (200, b"no JSON"),
        (200, b'{"workers": [{"worker_id": "decode-0", "ranks": 3}]}'),
    ):
        assert main(["trace", "req-1", "--url", serve(found | {"/admin/workers": (status, body)})]) == 0
        assert "ranks on" not in capsys.readouterr().out


def test_a_decode_tells_its_drafts_by_position(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    (decode, *others), drafts = REQUEST["stages"], DraftCounts(4, (4, 4, 2), (4, 3, 1), 0.25)
    stages = [{**decode, "attributes": draft_attributes(drafts)}, *others]
    url = serve({"/admin/requests/req-1": (200, json.dumps({**REQUEST, "stages": stages}).encode())})
    assert main(["trace", "req-1", "--url", url]) == 0
    assert (
        "4 steps, 10 drafted, 8 accepted, accepted by position 1: 4 of 4, 2: 3 of 4, 3: 1 of 2, tokens per step 3.0, "
        "time saved 250.0 ms"
    ) in " ".join(capsys.readouterr().out.split())


def test_stages_come_in_order_with_bars_and_figures(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    url = serve({"/admin/requests/req-1": (200, json.dumps(REQUEST).encode())})
    assert main(["trace", "req-1", "--url", f"{url}/"]) == 0
    headline, header, *rows = capsys.readouterr().out.splitlines()
    assert headline == (
        "req-1 · demo · finished · first token after 50.0 ms · ended after 100.0 ms · 40 prompt tokens · "
        "32 of them cached · 8 output tokens · workers prefill-0, decode-0"
    )
    assert header.split() == ["stage", "process", "start", "ms", "ms", "details"]
    assert [row.split("  ")[0].strip() for row in rows] == ["pair", "transfer", "decode", "first token"]
    assert rows[0].rstrip().endswith("  policy cost, decision 0.6 ms")
    assert "4.0 MiB, 4 blocks, source prefill-0, 2.10 GB/s" in rows[1]
    assert [rows[2].split()[i] for i in (2, 3)] == ["50.0", "50.0"]
    assert [row.count("█") for row in rows] == [0, 0, 12, 0]
    assert rows[2].index("█") - rows[0].index("▎") == 12


def test_what_was_known_of_a_prompt_stands_beside_what_was_new(
    serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bytes of both were shown without saying which is which."""
    counts = EncodingCounts(574_464, 580_608, 100_000, 101_517, 6250, 6344, num_unread_messages=198)
    stage = REQUEST["stages"][1] | {"name": "tokenise", "attributes": counts.attributes}
    url = serve({"/admin/requests/r": (200, json.dumps(REQUEST | {"stages": [stage]}).encode())})
    assert main(["trace", "r", "--url", url]) == 0
    told = " ".join(line[-110:].strip() for line in capsys.readouterr().out.splitlines()[2:])
    for words in (
        "known 561.0 KiB, new 6.0 KiB",
        "known tokens 100000, new tokens 1517",
        "known blocks 6250, new blocks 94",
        "unread messages 198",
    ):
        assert words in " ".join(told.split())


def test_an_id_of_any_characters_is_asked_for_as_it_is(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    url = serve({"/admin/requests/a%2Fb%3Fc%20d": (200, json.dumps(REQUEST | {"stages": []}).encode())})
    assert main(["trace", "a/b?c d", "--url", url]) == 0


def test_markup_in_what_clients_chose_is_shown_as_it_is(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    request = REQUEST | {"request_id": "[red]x[/nope]", "stages": [REQUEST["stages"][1] | {"name": "[/b]"}]}
    url = serve({"/admin/requests/x": (200, json.dumps(request).encode())})
    assert main(["trace", "x", "--url", url]) == 0
    out = capsys.readouterr().out
    assert "[red]x[/nope]" in out
    assert "[/b]" in out


def test_a_key_is_sent_and_asked_for_where_it_is_missing(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    url = serve({"/admin/requests/closed": (200, json.dumps(REQUEST).encode())})
    assert main(["trace", "closed", "--url", url]) != 0
    assert "--api-key" in capsys.readouterr().err
    assert main(["trace", "closed", "--url", url, "--api-key", "sk-tandem-1\n"]) != 0
    assert main(["trace", "closed", "--url", url, "--api-key", "sk-tandem-1"]) == 0
    assert "decode-0" in capsys.readouterr().out


def test_an_unknown_request_is_said_so(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "req-2", "--url", serve({})]) == 2
    assert "does not know request 'req-2'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (200, b"<html>"),
        (200, b"[]"),
        (200, b'{"stages": [{}]}'),
        (200, b'{"stages": [{"name": "a", "start_s": NaN, "duration_s": 1}]}'),
        (200, b'{"stages": [{"name": "a", "start_s": 1, "duration_s": 1e999}]}'),
        (500, b'{"stages": []}'),
    ],
)
def test_what_no_gateway_says_is_refused(
    serve: Serve, capsys: pytest.CaptureFixture[str], status: int, body: bytes
) -> None:
    url = serve({"/admin/requests/req-1": (status, body)})
    assert main(["trace", "req-1", "--url", url]) == 2
    assert f"answers {status}, not what a gateway of Tandem says" in capsys.readouterr().err


def test_no_gateway_is_said_so(capsys: pytest.CaptureFixture[str]) -> None:
    async def closed_port() -> int:
        async with await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0) as server:
            port: int = server.sockets[0].getsockname()[1]
            return port

    url = f"http://127.0.0.1:{asyncio.run(closed_port())}"
    assert main(["trace", "req-1", "--url", url]) == 2
    assert f"no gateway answers at {url}" in capsys.readouterr().err
    assert main(["trace", "req-1", "--url", url.replace("//", "//me:hush@")]) == 2
    assert f"no gateway answers at {url} ({url}" in capsys.readouterr().err, "no password"
    assert main(["trace", "req-1", "--url", "localhost"]) == 2
    assert "is no HTTP address" in capsys.readouterr().err
    assert main(["trace", "req-1", "--url", "ftp://me:hush@host"]) == 2
    assert "'ftp://host/admin/requests/req-1' is no HTTP address" in capsys.readouterr().err
