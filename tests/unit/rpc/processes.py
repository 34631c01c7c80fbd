"""Processes that serve the handlers of `handlers`, to be killed and stopped."""

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

MORTAL_WORKER = """
import asyncio
from array import array
from tandem.rpc.server import serve_worker
from tests.helpers.secret import AS_WORKER
from tests.unit.rpc.handlers import Worker

async def main():
    server = await serve_worker(Worker(num_before_silence=1), "127.0.0.1:0", AS_WORKER)
    print(server.port, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""
MORTAL_ROUTER = """
import asyncio
from tandem.rpc.server import serve_router
from tests.unit.rpc.handlers import Router
from tests.helpers.secret import AS_ROUTER

async def main():
    server = await serve_router(Router(), "127.0.0.1:0", AS_ROUTER)
    print(server.port, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@asynccontextmanager
async def running(script: str) -> AsyncIterator[tuple[subprocess.Popen[str], str]]:
    """A process that serves, and its address."""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, f"127.0.0.1:{int(await asyncio.to_thread(process.stdout.readline))}"
        finally:
            process.kill()
