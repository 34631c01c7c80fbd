"""A TCP gate before any server, the fake or a real one: it can cut, refuse and hold what passes."""

import asyncio
import contextlib
from collections.abc import AsyncIterator


class Gate:
    """Forwards `port` to the server's. Made by `gate_before`."""

    def __init__(self, host: str, port: int) -> None:
        self._target = (host, port)
        self._server: asyncio.Server | None = None
        self._passing: set[asyncio.Task[None]] = set()
        self._open = asyncio.Event()
        self._open.set()
        self.port = 0

    async def listen(self) -> None:
        """Let connections in, again at the same port."""
        self._server = await asyncio.start_server(self._pass, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def refuse(self) -> None:
        """Nobody listens any more; what was connected is cut."""
        if self._server is not None:
            self._server.close()
        await self.cut()

    async def cut(self) -> None:
        """Break every connection; new ones may come."""
        tasks = list(self._passing)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def hold(self) -> None:
        """From now on nothing passes; connections stay open and new ones are taken."""
        self._open.clear()

    def let_go(self) -> None:
        self._open.set()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._passing.add(task)
        onward: asyncio.StreamWriter | None = None
        try:
            await self._open.wait()
            back, onward = await asyncio.open_connection(*self._target)
            ways = [asyncio.create_task(self._copy(reader, onward)), asyncio.create_task(self._copy(back, writer))]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            self._passing.discard(task)
            for end in (writer, onward):
                if end is not None:
                    end.transport.abort()

    async def _copy(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                await self._open.wait()
                sink.write(data)
                await sink.drain()


@contextlib.asynccontextmanager
async def gate_before(host: str, port: int) -> AsyncIterator[Gate]:
    gate = Gate(host, port)
    await gate.listen()
    try:
        yield gate
    finally:
        gate.let_go()
        await gate.refuse()
