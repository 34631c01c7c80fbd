"""The gateway process: listens, serves, and on SIGTERM stops accepting, finishes its streams and exits with 0.

Invariant: a stream that is still open after the drain timeout gets an error event before it is closed.
"""

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Iterator
from functools import partial

import uvicorn
from starlette.types import ASGIApp

from tandem.core.clock import SystemClock
from tandem.core.errors import ConfigurationError
from tandem.core.heap import bound_heap
from tandem.core.open_files import allowed_sockets
from tandem.gateway.app import build_apps
from tandem.gateway.gateway import Gateway
from tandem.gateway.http_protocol import LAST_WORDS_S, LimitedHttpProtocol
from tandem.gateway.model import ServedModel
from tandem.gateway.settings import GatewaySettings
from tandem.process.ports import bound
from tandem.process.settings import check_anonymous
from tandem.process.signals import exit_when_told
from tandem.telemetry.log import configure_logging
from tandem.telemetry.tracing import Tracing

_BACKLOG = 2048
_KEEP_ALIVE_S = 65  # for which an idle connection stays open
_TICK_S = 1.0  # the `date` header's resolution

_logger = logging.getLogger(__name__)


class GatewayServer(uvicorn.Server):
    """Uvicorn without its own signal handling. `stop` begins draining; a second call ends it at once."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._stopping = asyncio.Event()
        self._cutting = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def stop(self) -> None:
        self.force_exit = self.should_exit
        self.should_exit = True
        self._stopping.set()
        if self.force_exit:
            self._cutting.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """NOTE: Uvicorn leaves requests running when it is to end at once; what they have used must still be billed.
        From Python 3.12 on it waits in asyncio's loop until their clients have closed the connections.
        """
        closing = asyncio.create_task(super().shutdown(sockets))
        cutting = asyncio.create_task(self._cutting.wait())
        await asyncio.wait((closing, cutting), return_when=asyncio.FIRST_COMPLETED)
        cutting.cancel()
        left = tuple(self.server_state.tasks)
        for task in left:
            task.cancel()
        if left:
            await asyncio.wait(left, timeout=LAST_WORDS_S)
        for connection in tuple(self.server_state.connections):
            connection.transport.abort()
        await closing

    async def wait_stopping(self) -> None:
        """Waits until `stop` is called."""
        await self._stopping.wait()

    async def main_loop(self) -> None:
        """NOTE: Uvicorn's own loop polls ten times a second for a stop, and formats the date each time."""
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_TICK_S):
                    await self._stopping.wait()


class RunningGateway:
    """A gateway that listens at `url`. `admin_url`: of the separate operators' port, or None."""

    def __init__(self, gateway: Gateway, server: GatewayServer, url: str, admin_url: str | None) -> None:
        self.gateway = gateway
        self.url = url
        self.admin_url = admin_url
        self._server = server
        self._stopped_s: float | None = None

    @property
    def is_stopping(self) -> bool:
        """Whether `stop` was called."""
        return self._stopped_s is not None

    def stop(self) -> None:
        """Refuses further requests and finishes running ones; a second call ends at once."""
        if self._stopped_s is None:
            _logger.info("gateway stops taking requests")
            self._stopped_s = self.gateway.clock.now_s()
        else:
            self.gateway.responses.background.leave()
        self.gateway.admission.close()
        self._server.stop()

    async def close(self, drain_timeout_s: float) -> None:
        """Closes the gateway after it has stopped serving; `drain_timeout_s` counts from the first `stop`."""
        assert self._stopped_s is not None
        left_s = self._stopped_s + drain_timeout_s - self.gateway.clock.now_s()
        await self.gateway.close(0.0 if self._server.force_exit else left_s)


def run_gateway(settings: GatewaySettings) -> int:
    """Serves until SIGTERM or SIGINT; returns the exit code."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # NOTE: a prompt's threads would delay other requests
    bound_heap()
    configure_logging(settings.log_level, settings.log_format, "gateway")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(_run(settings))


async def _run(settings: GatewaySettings) -> int:
    exit_when_told()
    async with serving_gateway(settings) as (running, finished):
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, running.stop)
        # NOTE: what lives as long as the process need not be looked through at every collection.
        gc.collect()
        gc.freeze()
        if running.admin_url is not None:
            _logger.info("operators are answered at %s", running.admin_url)
        _logger.info("gateway ready at %s", running.url)
        await finished.wait()
        _logger.info("gateway stops")
    return 0


@contextlib.asynccontextmanager
async def serving_gateway(settings: GatewaySettings) -> AsyncIterator[tuple[RunningGateway, asyncio.Event]]:
    """Serves until the block ends or the gateway is stopped, which sets the event.

    Raises:
        ConfigurationError: the address cannot be listened at, or a setting cannot be honoured.
        CheckpointError: the model's tokenizer cannot be used.
    """
    check_anonymous(settings.host, has_accounts=settings.accounts is not None, is_allowed=settings.allow_anonymous)
    model = await asyncio.to_thread(
        ServedModel.load,
        settings.model,
        settings.served_model_name,
        int(time.time()),
        tool_parser=settings.tool_parser,
        reasoning_parser=settings.reasoning_parser,
        max_known_bytes=int(settings.known_prompts_mib * 2**20),
    )
    tracing = Tracing.configure("gateway", settings.otlp_endpoint)
    with contextlib.closing(_listen(settings.host, settings.port)) as listener:
        gateway = Gateway(settings, model, SystemClock(), tracing)
        apps = build_apps(gateway, settings)
        finished = asyncio.Event()
        async with _operators(settings, apps.operator, finished) as admin_url:
            server = GatewayServer(_uvicorn_config(settings, apps.public))
            running = RunningGateway(gateway, server, _url(settings.host, listener), admin_url)
            gateway.start()
            task = asyncio.create_task(_serve(server, listener, finished), name="http server")
            drain = asyncio.create_task(_drain(running, server, settings.drain_timeout_s), name="drain")
            try:
                yield running, finished
            finally:
                if not running.is_stopping:  # NOTE: a second call would give background responses no time
                    running.stop()
                await task
                drain.cancel()
                await asyncio.gather(drain, return_exceptions=True)
                await running.close(settings.drain_timeout_s)
                await asyncio.to_thread(tracing.close)


@contextlib.asynccontextmanager
async def _operators(settings: GatewaySettings, app: ASGIApp, finished: asyncio.Event) -> AsyncIterator[str | None]:
    """Serves the operators' port, if any, during the block; yields its URL. Sets `finished` when its server ends."""
    if settings.admin_address is None:
        yield None
        return
    host, port = settings.admin_address
    with contextlib.closing(_listen(host, port, "--admin-bind")) as listener:
        server = GatewayServer(_uvicorn_config(settings, app))
        task = asyncio.create_task(_serve(server, listener, finished), name="operators' http server")
        try:
            yield _url(host, listener)
        finally:
            server.stop()
            server.stop()  # NOTE: a scrape that is cut is no loss
            await task


async def _serve(server: GatewayServer, listener: socket.socket, finished: asyncio.Event) -> None:
    try:
        await server.serve(sockets=[listener])
    finally:
        finished.set()


async def _drain(running: RunningGateway, server: GatewayServer, timeout_s: float) -> None:
    """After `stop`, waits for open streams up to the timeout, then ends them with an error."""
    await server.wait_stopping()
    await asyncio.sleep(timeout_s)
    running.gateway.fail_open("this gateway is stopping; send the request again")


def _uvicorn_config(settings: GatewaySettings, app: ASGIApp) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        # NOTE: uvicorn asks for a class, and calls what it is given
        http=partial(LimitedHttpProtocol, max_connections=allowed_sockets()),  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=int(settings.drain_timeout_s + LAST_WORDS_S) + 1,
        backlog=_BACKLOG,
    )


def _listen(host: str, port: int, flag: str = "--host or --port") -> socket.socket:
    """A listening socket. Raises ConfigurationError naming the address that is taken or invalid, and its flag."""
    try:
        listener = bound(host, port)
        listener.listen(_BACKLOG)  # NOTE: here, so that whoever was told the address can connect
    except OSError as error:
        raise ConfigurationError(f"cannot listen at {host}:{port} ({error}); choose another {flag}") from error
    return listener


def _url(host: str, listener: socket.socket) -> str:
    name = host.strip("[]")
    shown = f"[{name}]" if ":" in name else name
    return f"http://{shown}:{listener.getsockname()[1]}"


def _loop_factory() -> "type[asyncio.AbstractEventLoop] | None":
    """uvloop's event loop if it is installed."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.Loop
