"""A stranger on a worker's machine, without its secret, who knows all wires' magic numbers and where its memory is."""

import random
import socket
import struct
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import psutil

from tandem.transport.tcp import wire

UCX_TCP_MAGIC = 0xCAFEBABE12345678
UCX_MESSAGES = range(36)  # active messages, then connection management, PUT, its acknowledgement, keep-alive
UCX_PUT = 33
PATTERN = b"written by a stranger "
ANSWER_S = 0.3
NUM_AT_ONCE = 32


def listening(process: psutil.Process) -> list[tuple[str, int]]:
    """(host, port) of every TCP socket that listens and every UDP socket that is bound and takes from all."""
    return [
        (entry.laddr.ip.removeprefix("::ffff:"), entry.laddr.port)
        for entry in process.net_connections("inet")
        if entry.status in (psutil.CONN_LISTEN, psutil.CONN_NONE) and entry.laddr and not entry.raddr
    ]


def bound_names(process: psutil.Process) -> list[str]:
    """Of its Unix sockets, in the file system or, beginning with @, abstract."""
    return [str(entry.laddr) for entry in process.net_connections("unix") if entry.laddr]


def writes(addresses: Sequence[int]) -> Iterator[bytes]:
    """UCX's request to write `PATTERN` at each address; where UCX listens, one of them is all it takes."""
    for address in addresses:
        yield _ucx(UCX_PUT, struct.pack("<QQI", address, len(PATTERN), 1)) + PATTERN


def packets(addresses: Sequence[int], seed: int) -> Iterator[bytes]:
    """Messages to a port, each over a connection of its own, that try to write or read memory at `addresses`."""
    source = random.Random(seed)
    yield from (b"", b"\0", b"GET / HTTP/1.1\r\n\r\n", source.randbytes(4096))
    yield from writes(addresses)
    for message in UCX_MESSAGES:
        yield _ucx(message, struct.pack("<QQI", addresses[0], 64, 1) + source.randbytes(64))
    read = wire.pack_request(1, [(1, 3)])
    yield read
    yield wire.MAGIC + read
    for mac in (bytes(32), source.randbytes(32)):
        for expected in (bytes(16), source.randbytes(16)):
            yield wire.AUTH.pack(wire.MAGIC, wire.PROTOCOL_VERSION, source.randbytes(32), expected, mac) + read


def intrude(ports: Sequence[tuple[str, int]], messages: Sequence[bytes]) -> bytes:
    """Send each message to each port over a connection of its own; all that came back."""
    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        jobs = [pool.submit(_send, port, message) for port in ports for message in messages]
        return b"".join(job.result() for job in jobs)


def spam(name: str) -> None:
    """Datagrams of several sizes, empty ones too, to a Unix socket until it takes no more."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        try:
            for size in (0, 1, 0, 4, 64, 4096) * 20:
                sender.sendto(b"x" * size, b"\0" + name[1:].encode() if name.startswith("@") else name)
        except OSError:
            return


def _ucx(message: int, body: bytes) -> bytes:
    return struct.pack("<QBI", UCX_TCP_MAGIC, message, len(body)) + body


def _send(port: tuple[str, int], message: bytes) -> bytes:
    """Bytes that came back until the port closed or fell silent; none if it does not accept connections."""
    received = b""
    try:
        with socket.create_connection(port, timeout=ANSWER_S) as connection:
            connection.sendall(message)
            while piece := connection.recv(65536):
                received += piece
    except OSError:
        pass
    return received
