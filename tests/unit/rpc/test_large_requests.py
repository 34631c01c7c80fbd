"""Requests of strangers are refused before they are read, however large."""

import asyncio

import grpc
import pytest

from tandem.rpc import methods
from tandem.rpc.channel import CLIENT_OPTIONS
from tandem.rpc.server import serve_worker
from tandem.rpc.status import PROOF_KEY
from tests.helpers.raw_calls import ended
from tests.helpers.secret import AS_WORKER
from tests.helpers.wire_tap import tapping
from tests.unit.rpc.handlers import Worker

NUM_BYTES = 48 << 20


@pytest.mark.parametrize("proof", ["", f"{'0' * 32}.1.{'0' * 64}"], ids=["no proof", "of no session"])
@pytest.mark.parametrize("method", [methods.STATUS, methods.GENERATE, methods.SERVE], ids=lambda each: each.name)
def test_a_large_request_of_a_stranger_is_not_read(method: methods.Method[object, object], proof: str) -> None:
    """Regression: gRPC read requests of up to 64 MiB before anything was checked, any number of them at a time."""

    async def check() -> None:
        server = await serve_worker(Worker(), "127.0.0.1:0", AS_WORKER)
        async with tapping(server.address) as tap:
            channel = grpc.aio.insecure_channel(tap.address, options=CLIENT_OPTIONS)
            metadata = ((PROOF_KEY, proof),) if proof else ()
            end = await ended(channel, method.path, bytes(NUM_BYTES), metadata)
            await channel.close()
        assert end.code is grpc.StatusCode.UNAUTHENTICATED, end
        assert sum(map(len, tap.sent)) < NUM_BYTES / 4
        await server.stop()

    asyncio.run(asyncio.wait_for(check(), 30))
