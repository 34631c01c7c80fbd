"""Somebody without the cluster secret who listens where a worker is looked for, over real gRPC."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc


@asynccontextmanager
async def impostor(answer: Callable[[bytes], bytes], bind: str = "127.0.0.1:0") -> AsyncIterator[tuple[str, list[str]]]:
    """Listens where a worker is looked for and knows no secret; its address, and the names of what was called."""
    called: list[str] = []

    class Handlers(grpc.GenericRpcHandler):
        def service(self, handler_call_details: Any) -> "grpc.RpcMethodHandler[bytes, bytes]":
            called.append(handler_call_details.method.rpartition("/")[2])

            async def serve(data: bytes, context: object) -> bytes:
                return answer(data)

            return grpc.unary_unary_rpc_method_handler(serve)

    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Handlers(),))
    port = server.add_insecure_port(bind)
    await server.start()
    try:
        yield f"127.0.0.1:{port}", called
    finally:
        await server.stop(None)
