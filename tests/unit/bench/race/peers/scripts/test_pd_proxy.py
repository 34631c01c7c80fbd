"""The proxy of vLLM's 1P1D, between two stand-ins: who is asked what, and that the answer's bytes are passed on."""

import asyncio
import json
import socket
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from bench.race.peers.process import HOST
from bench.race.peers.scripts.pd_proxy import Proxy, prefill_part

LIMIT_S = 20.0
PLACE = {"do_remote_prefill": True, "remote_block_ids": [3, 4], "remote_port": 5600}
EVENTS = b'data: {"choices": [{"token_ids": [7]}]}\n\ndata: [DONE]\n\n'
ASKED = {"prompt": [1, 2], "max_tokens": 8, "stream": True, "stream_options": {"include_usage": True}}


class StandIn:
    """A server that remembers what it was asked and answers as told."""

    def __init__(self, status: int, answer: bytes, content_type: str) -> None:
        self.bodies: list[dict[str, Any]] = []
        self._socket = bound()
        self.port: int = self._socket.getsockname()[1]
        self._answer = (status, answer, content_type)

    async def start(self) -> web.AppRunner:
        application = web.Application()
        application.router.add_post("/v1/completions", self._complete)
        application.router.add_get("/health", self._health)
        return await listen(application, self._socket)

    async def _complete(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.json())
        status, answer, content_type = self._answer
        return web.Response(status=status, body=answer, content_type=content_type)

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()


def bound() -> socket.socket:
    """At a port of its own, which refuses connections until somebody listens."""
    here = socket.socket()
    here.bind((HOST, 0))
    return here


async def listen(application: web.Application, here: socket.socket) -> web.AppRunner:
    runner = web.AppRunner(application)
    await runner.setup()
    await web.SockSite(runner, here).start()
    return runner


async def through(prefill: StandIn, decode: StandIn) -> tuple[int, bytes, int]:
    """Status and content of a request to a proxy between them, and its health before."""
    here = bound()
    port = here.getsockname()[1]
    proxy = Proxy(f"http://{HOST}:{prefill.port}", f"http://{HOST}:{decode.port}")
    runners = [await prefill.start(), await listen(proxy.application(), here)]
    try:
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://{HOST}:{port}/health") as early:
                assert early.status == 503
            runners.append(await decode.start())
            async with session.get(f"http://{HOST}:{port}/health") as answer:
                health = answer.status
            async with session.post(f"http://{HOST}:{port}/v1/completions", json=ASKED) as answer:
                return answer.status, await answer.read(), health
    finally:
        for runner in reversed(runners):
            await runner.cleanup()


def run(prefill: StandIn, decode: StandIn) -> tuple[int, bytes, int]:
    return asyncio.run(asyncio.wait_for(through(prefill, decode), LIMIT_S))


def test_prefill_is_asked_for_one_token_and_decode_is_told_where_the_blocks_are() -> None:
    prefill = StandIn(200, json.dumps({"kv_transfer_params": PLACE}).encode(), "application/json")
    decode = StandIn(200, EVENTS, "text/event-stream")
    assert run(prefill, decode) == (200, EVENTS, 200)
    assert prefill.bodies == [prefill_part(ASKED)]
    assert decode.bodies == [{**ASKED, "kv_transfer_params": PLACE}]


def test_a_prefill_that_refuses_is_passed_on() -> None:
    decode = StandIn(200, EVENTS, "text/event-stream")
    assert run(StandIn(400, b"too long", "text/plain"), decode)[:2] == (400, b"too long")
    assert not decode.bodies


@pytest.mark.parametrize("name", ["stream_options", "min_tokens"])
def test_the_prefill_s_part_is_whole_and_one_token(name: str) -> None:
    part = prefill_part({**ASKED, "min_tokens": 8})
    assert name not in part
    assert (part["stream"], part["max_tokens"], part["prompt"]) == (False, 1, [1, 2])
    assert part["kv_transfer_params"]["do_remote_decode"] is True
