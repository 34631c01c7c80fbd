"""Somebody on the way between a client and a server, who passes on and keeps every byte, and can send them again."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field


@dataclass(slots=True)
class WireTap:
    """`sent`: what clients sent, by connection; `answered`: what the server answered."""

    target: str
    sent: list[bytearray] = field(default_factory=list)
    answered: list[bytearray] = field(default_factory=list)
    address: str = ""
    _flows: list[asyncio.Event] = field(default_factory=list)
    _ends: list[tuple[asyncio.StreamWriter, asyncio.Task[None]]] = field(default_factory=list)

    def hold(self) -> None:
        """Connections made so far stay and bring nothing more, until `release`."""
        for flow in self._flows:
            flow.clear()

    def release(self) -> None:
        for flow in self._flows:
            flow.set()

    @property
    def everything(self) -> bytes:
        return b"".join(map(bytes, (*self.sent, *self.answered)))

    async def send_again(self, number: int, answer_s: float) -> bytes:
        """All that a connection's client sent, on a new connection; what is answered until nothing comes any more."""
        reader, writer = await self._connect()
        writer.write(self.sent[number])
        answer = bytearray()
        with contextlib.suppress(TimeoutError):
            while True:
                async with asyncio.timeout(answer_s):
                    chunk = await reader.read(1 << 16)
                if not chunk:
                    break
                answer += chunk
        writer.transport.abort()
        return bytes(answer)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        host, _, port = self.target.rpartition(":")
        return await asyncio.open_connection(host, int(port))

    async def pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await self._connect()
        self.sent.append(sent := bytearray())
        self.answered.append(answered := bytearray())
        self._flows.append(flow := asyncio.Event())
        flow.set()
        for end, copying in ((back, _copy(reader, back, sent, flow)), (writer, _copy(there, writer, answered, flow))):
            self._ends.append((end, asyncio.create_task(copying)))

    async def close(self) -> None:
        """End all connections."""
        for _, copying in self._ends:
            copying.cancel()
        await asyncio.gather(*(copying for _, copying in self._ends), return_exceptions=True)
        for end, _ in self._ends:
            end.transport.abort()


async def _copy(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, kept: bytearray, flow: asyncio.Event
) -> None:
    with contextlib.suppress(OSError):
        while chunk := await reader.read(1 << 16):
            await flow.wait()
            kept += chunk
            writer.write(chunk)
    writer.close()


@contextlib.asynccontextmanager
async def tapping(target: str) -> AsyncIterator[WireTap]:
    """Listens on the way to `target` for the time of the block."""
    tap = WireTap(target)
    server = await asyncio.start_server(tap.pass_on, "127.0.0.1", 0)
    tap.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield tap
    finally:
        server.close()
        await tap.close()
