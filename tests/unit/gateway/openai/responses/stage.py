"""A gateway with the routes of this API and nothing else, before a worker that says what it is told to."""

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import orjson
import uvicorn
from fastapi import FastAPI
from openai import AsyncOpenAI
from starlette.types import ASGIApp, Receive, Scope, Send

from tandem.accounts.key import AccountKey
from tandem.core.clock import SystemClock
from tandem.core.output import RequestMetrics, RequestOutput
from tandem.core.types import FinishReason, TokenLogprobs
from tandem.gateway.accounts import Caller, set_caller
from tandem.gateway.app import _add_error_handlers
from tandem.gateway.edge import Edge
from tandem.gateway.gateway import Gateway
from tandem.gateway.model import ServedModel
from tandem.gateway.openai.responses.routes import add_responses
from tandem.gateway.openai.responses.service import ResponseService
from tandem.gateway.openai.responses.store import EmbeddedResponseStore, ResponseStore
from tandem.gateway.server import GatewayServer
from tandem.gateway.settings import GatewaySettings
from tandem.rpc.messages import GenerateCall, GenerateUpdate
from tandem.rpc.server import serve_router
from tandem.telemetry.tracing import Tracing
from tandem.text.tokenizer import Tokenizer
from tests.helpers.fake_backend import FakeRouter, RouterFace
from tests.helpers.fake_worker import MODEL, FakeWorker
from tests.helpers.secret import AS_ROUTER, SECRET
from tests.helpers.tokenizers import write_byte_tokenizer

NUM_CACHED = 3
BEAT_S = 0.02
TENANT_HEADER = b"x-test-tenant"
TEMPLATE = """
{%- if tools %}{{- '<|im_start|>tools\n' }}{%- for tool in tools %}{{- tool | tojson + '\n' }}{%- endfor %}{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' }}
{%- if message.reasoning_content %}{{- '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}{%- endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson + '}\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}
"""


@dataclass(eq=False)
class SayingWorker(FakeWorker):
    """Says the next of `answers`, `burst` characters a message. `hold_at` and `fail_at` count characters."""

    answers: list[str] = field(default_factory=list)

    async def _script(self, call: GenerateCall) -> AsyncIterator[GenerateUpdate]:
        if self.refuse is not None:
            raise self.refuse
        text = self.answers.pop(0)
        end = min(len(text), call.params.max_tokens or len(text))
        for start in range(0, max(1, end), self.burst):
            if self.hold_at is not None and start >= self.hold_at:
                self.reached.set()
                await self.go.wait()
            if self.fail_at is not None and start >= self.fail_at:
                raise self.failure
            is_last = start + self.burst >= end
            reason = (FinishReason.LENGTH if end < len(text) else FinishReason.STOP) if is_last else None
            yield GenerateUpdate(self._output(call, text[start : min(end, start + self.burst)], reason, end), ())

    def _output(self, call: GenerateCall, piece: str, reason: FinishReason | None, num_tokens: int) -> RequestOutput:
        token_ids = tuple(self.tokenizer.encode(piece, add_special_tokens=False)) if piece else ()
        logprobs: tuple[TokenLogprobs, ...] | None = None
        if call.params.logprobs is not None:
            logprobs = tuple(self._scored(token_id, call.params.logprobs) for token_id in token_ids)
        now_s = time.monotonic()
        num_prompt = len(call.prompt_token_ids)
        metrics = RequestMetrics(now_s, now_s, now_s, now_s, num_prompt, num_tokens, NUM_CACHED, 0, call.pins)
        final = None if reason is None else metrics
        return RequestOutput(call.request_id, 0, token_ids, piece, logprobs, None, reason, None, final)

    @property
    def last_prompt(self) -> str:
        """Text of the prompt of the last call."""
        return self.tokenizer.decode(self.calls[-1].prompt_token_ids, skip_special_tokens=False)


@dataclass(frozen=True, slots=True)
class Stage:
    """Running gateway with its service of responses, a fake router, a scripted worker and a client."""

    worker: SayingWorker
    router: FakeRouter
    gateway: Gateway
    service: ResponseService
    client: httpx.AsyncClient

    def sdk(self, tenant: str = "") -> AsyncOpenAI:
        """The official client, which refuses what its types do not know and retries nothing."""
        return AsyncOpenAI(
            base_url=f"{self.client.base_url}/v1",
            api_key="none",
            max_retries=0,
            timeout=20,
            default_headers={TENANT_HEADER.decode(): tenant},
            _strict_response_validation=True,
        )


Story = Callable[[Stage], Awaitable[None]]


class _Tenants:
    """In the guard's place: the caller is whoever a header says."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        tenant = dict(scope["headers"]).get(TENANT_HEADER, b"").decode()
        if tenant:
            set_caller(scope, Caller(_key(tenant)))
        await self._app(scope, receive, send)


def tell(directory: Path, story: Story, *answers: str, **options: Any) -> None:
    """Run a story; the worker gives `answers`, one a request."""

    async def run() -> None:
        async with staged(directory, *answers, **options) as stage:
            await story(stage)

    asyncio.run(run())


@contextlib.asynccontextmanager
async def staged(
    directory: Path,
    *answers: str,
    burst: int = 4,
    store: ResponseStore | None = None,
    beat_s: float = BEAT_S,
    template: str = TEMPLATE,
    **settings: Any,
) -> AsyncIterator[Stage]:
    """Everything, for the time of the block."""
    write_byte_tokenizer(directory)
    (directory / "chat_template.jinja").write_text(template)
    async with contextlib.AsyncExitStack() as stack:
        worker = SayingWorker("talker", Tokenizer.load(directory), answers=list(answers), burst=burst)
        await worker.serve()
        stack.push_async_callback(worker.kill)
        router = FakeRouter([worker])
        router.server = await serve_router(RouterFace(router), "127.0.0.1:0", AS_ROUTER)
        stack.push_async_callback(router.server.stop, 0)
        model = ServedModel.load(str(directory), MODEL, int(time.time()))
        where = {"model": str(directory), "routers": router.server.address, "cluster_secret": SECRET.decode()}
        configured = GatewaySettings.model_validate({**where, **settings})
        gateway = Gateway(configured, model, SystemClock(), Tracing.configure("gateway", None))
        gateway.start()
        stack.push_async_callback(gateway.close)
        service = ResponseService(store or EmbeddedResponseStore(), beat_s)
        stack.push_async_callback(service.close)
        url = await stack.enter_async_context(_listening(gateway, service))
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=20, verify=False))
        yield Stage(worker, router, gateway, service, client)


@contextlib.asynccontextmanager
async def _listening(gateway: Gateway, service: ResponseService) -> AsyncIterator[str]:
    app = FastAPI(redirect_slashes=False)
    add_responses(app, gateway, service)
    _add_error_handlers(app)
    config = uvicorn.Config(
        Edge(_Tenants(app), gateway.ids), ws="none", lifespan="off", log_config=None, timeout_graceful_shutdown=1
    )
    server = GatewayServer(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        task = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.stop()
            await task


def _key(tenant: str) -> AccountKey:
    return AccountKey(key_id=tenant, digest=tenant, name=tenant, tenant=tenant)


def frames_of(text: str) -> list[Mapping[str, Any]]:
    """The events of a stream; each is named by its own type."""
    events = []
    for frame in text.split("\n\n"):
        if frame:
            name, data = frame.split("\n")
            value = orjson.loads(data.removeprefix("data: "))
            assert name == f"event: {value['type']}"
            events.append(value)
    return events
