"""A relay between a client and its Redis that can withhold the answers of single connections."""

import asyncio
import contextlib
from collections.abc import AsyncIterator


class Relay:
    """Connections by the order in which they were opened; those in `withheld` get no answers.

    `asked` is set when something has been sent on a withheld connection.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._connections: list[asyncio.Task[None]] = []
        self.withheld: set[int] = set()
        self.asked = asyncio.Event()

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = len(self._connections)
        self._connections.append(asyncio.create_task(self._serve(number, reader, writer)))

    async def close(self) -> None:
        """End all connections."""
        for connection in self._connections:
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _serve(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_redis, to_redis = await asyncio.open_connection("127.0.0.1", self._port)
        with contextlib.closing(writer), contextlib.closing(to_redis):
            await asyncio.gather(self._forward(number, reader, to_redis), self._answer(number, from_redis, writer))

    async def _forward(self, number: int, reader: asyncio.StreamReader, to_redis: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            to_redis.write(data)
            if number in self.withheld:
                self.asked.set()
        to_redis.write_eof()

    async def _answer(self, number: int, from_redis: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await from_redis.read(1 << 16):
            if number not in self.withheld:
                writer.write(data)


@contextlib.asynccontextmanager
async def relay_to(port: int) -> AsyncIterator[tuple[Relay, str]]:
    """A relay to the Redis at this port of loopback, and its URL."""
    relay = Relay(port)
    server = await asyncio.start_server(relay.accept, "127.0.0.1", 0)
    try:
        async with server:
            yield relay, f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        await relay.close()
