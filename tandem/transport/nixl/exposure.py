"""Checks the TCP ports that UCX opens: each client that connects there can write to memory. Refuses ports open to other
hosts.
"""

import ipaddress
import logging
import os
import re
import socket
import struct
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from tandem.core.errors import ConfigurationError

_TABLES = (("tcp", "I"), ("tcp6", "4I"))
_LISTEN = "0A"  # of include/net/tcp_states.h

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Listener:
    """TCP socket on which this process listens. `inode` distinguishes it from a later one at the same address."""

    inode: str
    host: Address
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if self.host.version == 6 else f"{self.host}:{self.port}"


def listeners() -> frozenset[Listener]:
    """Returns the listening sockets of this process, from /proc."""
    ours = _socket_inodes()
    return frozenset(
        Listener(fields[9], *_parse(fields[1], words))
        for table, words in _TABLES
        for fields in _rows(Path("/proc/self/net") / table)
        if fields[3] == _LISTEN and fields[9] in ours
    )


def check_exposure(new: Collection[Listener], bind_host: str) -> None:
    """Warn of each of these TCP listeners, all UCX's; refuse one that other hosts may reach.

    Raises:
        ConfigurationError: one listens neither at `bind_host` nor on loopback.
    """
    allowed = _addresses(bind_host)
    for listener in new:
        if not (listener.host.is_loopback or listener.host in allowed or any(a.is_unspecified for a in allowed)):
            raise ConfigurationError(
                f"UCX listens at {listener}, outside bind={bind_host}, and takes writes into this worker's memory from"
                f" all who connect there. {_settings()}. Leave tcp out, as UCX_TLS=^tcp,sysv does, or name the devices"
                " it may use, as UCX_NET_DEVICES=lo does; or unset both variables"
            )
        logger.warning(
            "UCX listens at %s: all who can connect there can write into this worker's memory. %s. Leave tcp out unless"
            " only trusted users and hosts can",
            listener,
            _settings(),
        )


def _settings() -> str:
    return ", ".join(f"{name} is {os.environ.get(name, 'not set')!r}" for name in ("UCX_TLS", "UCX_NET_DEVICES"))


def _addresses(host: str) -> set[Address]:
    """Returns the addresses of a name, none if it cannot be resolved. "" means every address."""
    try:
        found = socket.getaddrinfo(host or "0.0.0.0", None, type=socket.SOCK_STREAM)
    except OSError:
        return set()
    return {ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in found}


def _socket_inodes() -> set[str]:
    found = set[str]()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:  # NOTE: closed meanwhile
            continue
        if match := re.fullmatch(r"socket:\[(\d+)\]", target):
            found.add(match[1])
    return found


def _rows(table: Path) -> list[list[str]]:
    """Returns a table's rows without the heading; none if the kernel lacks the protocol."""
    return [line.split() for line in table.read_text().splitlines()[1:]] if table.exists() else []


def _parse(text: str, words: str) -> tuple[Address, int]:
    """Parses an address in the format of /proc: 32-bit words in native byte order, then the port."""
    host, _, port = text.partition(":")
    swapped = struct.unpack(f">{words}", bytes.fromhex(host))
    address = ipaddress.ip_address(struct.pack(f"={words}", *swapped))
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address, int(port, 16)
