"""Carries one port of a Service to one of its ready endpoints, chosen anew for each connection.

A connection lives on when its endpoint is taken off the list, as under kube-proxy; new ones go elsewhere.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence

_CHUNK_BYTES = 65536
_CONNECT_S = 2.0
Endpoint = tuple[str, int]


class PortProxy:
    """Listens at a Service's address and port. `endpoints` tells who is ready now."""

    def __init__(self, address: str, port: int, endpoints: Callable[[], Sequence[Endpoint]]) -> None:
        self.address = address
        self.port = port
        self._endpoints = endpoints
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen. Raises OSError when the address is not this machine's."""
        self._server = await asyncio.start_server(self._serve, self.address, self.port)

    async def stop(self) -> None:
        """Stop listening and cut what is open."""
        assert self._server is not None
        self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)
        try:
            await self._carry(reader, writer)
        finally:
            writer.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far = await self._connect()
        if far is None:
            writer.transport.abort()
            return
        try:
            await asyncio.gather(_pump(reader, far[1]), _pump(far[0], writer))
        except OSError:
            writer.transport.abort()
            far[1].transport.abort()
        finally:
            far[1].close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        candidates = list(self._endpoints())
        random.shuffle(candidates)
        for host, port in candidates:
            try:
                async with asyncio.timeout(_CONNECT_S):
                    return await asyncio.open_connection(host, port)
            except (OSError, TimeoutError):
                continue
        return None


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy until the end; the end is passed on, the other direction stays open."""
    while data := await reader.read(_CHUNK_BYTES):
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()
