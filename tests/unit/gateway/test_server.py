"""The process: says where it listens, drains on SIGTERM, exits 0; mistakes in settings are one line and exit 2."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import uvicorn
from starlette.types import Receive, Scope, Send

from tandem.gateway.server import GatewayServer
from tandem.rpc.server import serve_router
from tandem.text.tokenizer import Tokenizer
from tests.helpers import command_line
from tests.helpers.fake_backend import MODEL, FakeRouter, FakeWorker, RouterFace, text_of
from tests.helpers.secret import AS_ROUTER, SECRET
from tests.helpers.tokenizers import write_byte_tokenizer

ENVIRONMENT = os.environ | {"TANDEM_CLUSTER_SECRET": SECRET.decode()}
ASKED = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 6, "seed": 1, "stream": True}


FLAGS = ("--port", "0", "--served-model-name", MODEL)


def command(*flags: str) -> list[str]:
    return [sys.executable, "-m", "services.gateway", *FLAGS, *flags]


async def said(stream: asyncio.StreamReader, words: str) -> str:
    """The line that holds these words."""
    async with asyncio.timeout(30):
        while words not in (line := (await stream.readline()).decode()):
            assert line, "the process ended"
    return line


def test_sigterm_lets_streams_finish_and_exits_0(tmp_path: Path) -> None:
    async def run() -> None:
        write_byte_tokenizer(tmp_path)
        worker = FakeWorker("decode-0", Tokenizer.load(tmp_path), hold_at=3)
        await worker.serve()
        router = await serve_router(RouterFace(FakeRouter([worker])), "127.0.0.1:0", AS_ROUTER)
        flags = command("--model", str(tmp_path), "--routers", router.address)
        process = await asyncio.create_subprocess_exec(*flags, stderr=asyncio.subprocess.PIPE, env=ENVIRONMENT)
        assert process.stderr is not None
        url = (await said(process.stderr, "gateway ready at ")).split()[-1]
        async with httpx.AsyncClient(base_url=url, timeout=20, verify=False) as client:
            assert (await client.get("/ready")).status_code == 200
            answer = asyncio.create_task(client.post("/v1/chat/completions", json=ASKED))
            await asyncio.wait_for(worker.reached.wait(), 10)
            process.send_signal(signal.SIGTERM)
            await said(process.stderr, "gateway stops taking requests")
            worker.go.set()
            text = (await answer).text
        assert text.endswith("data: [DONE]\n\n")
        assert "".join(re.findall(r'"content":"([a-z]*)"', text)) == text_of(1, 6)
        rest = (await asyncio.wait_for(process.stderr.read(), 10)).decode()
        assert await asyncio.wait_for(process.wait(), 10) == 0
        assert "Traceback" not in rest
        await router.stop()
        await worker.kill()

    asyncio.run(run())


def test_requests_that_a_second_stop_cuts_have_ended_when_the_server_has() -> None:
    """They were cancelled after accounts had been closed, so that their last part was not billed."""

    async def run() -> None:
        events: list[str] = []
        has_begun = asyncio.Event()

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            has_begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0)
                events.append("settled")

        server = GatewayServer(uvicorn.Config(app, lifespan="off", log_config=None))
        with socket.create_server(("127.0.0.1", 0)) as listener:
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            _, writer = await asyncio.open_connection(*listener.getsockname())
            writer.write(b"GET / HTTP/1.1\r\nhost: h\r\n\r\n")
            await asyncio.wait_for(has_begun.wait(), 10)
            server.stop()
            server.stop()
            await asyncio.wait_for(serving, 10)
            events.append("closed")
            writer.close()
        assert events == ["settled", "closed"]

    asyncio.run(run())


def test_mistakes_are_one_line_and_exit_2(tmp_path: Path) -> None:
    write_byte_tokenizer(tmp_path)
    empty = tmp_path / "empty"
    empty.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        cases = {
            "--model is required": [],
            "is not a directory": ["--model", "/nowhere/at/all"],
            "tokenizer.json": ["--model", str(empty)],
            f"cannot listen at 127.0.0.1:{port}": ["--model", str(tmp_path), "--port", port],
            "--routers": ["--model", str(tmp_path), "--routers", "nonsense"],
        }
        for words, flags in cases.items():
            done = command_line.run(*FLAGS, *flags, module="services.gateway", env=ENVIRONMENT, timeout_s=60)
            assert done.returncode == 2, (words, done.stderr)
            assert words in done.stderr
            assert done.stderr.count("\n") == 1, done.stderr


def test_a_gateway_process_holds_no_torch() -> None:
    code = "import sys, tandem.gateway.server; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
