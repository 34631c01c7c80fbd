"""The cluster's DNS: answers A queries for Services, and NXDOMAIN for everything else. No recursion, UDP only."""

from __future__ import annotations

import asyncio
import ipaddress
import struct
from collections.abc import Callable, Sequence
from typing import cast

_TYPE_A, _CLASS_IN = 1, 1
_ANSWERED, _NO_SUCH_NAME = 0x8580, 0x8583
_TTL_S = 1
Lookup = Callable[[str], Sequence[str] | None]


def answer(query: bytes, lookup: Lookup) -> bytes:
    """The reply to a query of one question. `lookup` gives a name's addresses, or None when there is no such name."""
    end = 12
    labels = []
    while query[end]:
        labels.append(query[end + 1 : end + 1 + query[end]].decode())
        end += 1 + query[end]
    kind, kind_class = struct.unpack(">HH", query[end + 1 : end + 5])
    question = query[12 : end + 5]
    addresses = lookup(".".join(labels).lower())
    asked = (kind, kind_class) == (_TYPE_A, _CLASS_IN)
    found = list(addresses or []) if asked else []
    flags = _NO_SUCH_NAME if addresses is None else _ANSWERED
    head = query[:2] + struct.pack(">HHHHH", flags, 1, len(found), 0, 0)
    return head + question + b"".join(_record(address) for address in found)


def _record(address: str) -> bytes:
    """An A record whose name points back at the question's."""
    return struct.pack(">HHHIH", 0xC00C, _TYPE_A, _CLASS_IN, _TTL_S, 4) + ipaddress.IPv4Address(address).packed


class DnsProtocol(asyncio.DatagramProtocol):
    """Serves `lookup` on a datagram endpoint."""

    def __init__(self, lookup: Lookup) -> None:
        self._lookup = lookup
        self._transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.DatagramTransport, transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        assert self._transport is not None
        try:
            reply = answer(data, self._lookup)
        except (IndexError, struct.error, UnicodeDecodeError):
            return
        self._transport.sendto(reply, addr)
