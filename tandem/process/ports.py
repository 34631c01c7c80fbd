"""Finds free ports of this machine, for processes that are started, and restarted, at the same address."""

import random
import socket
from collections.abc import Collection

from tandem.core.errors import CapacityError

# NOTE: below the range from which systems take ports of outgoing connections: one of those may hold a port for as long
# as it lives, and a process that is started again would find its own port taken.
_FIRST, _LAST = 15000, 32000
_MAX_TRIES = 10_000


def free_ports(count: int, host: str, source: random.Random, *, kept: Collection[int] = ()) -> list[int]:
    """Returns `count` different ports that are not in use now.

    Args:
        kept: ports for others that do not listen yet; none of them is returned.

    Raises:
        CapacityError: none were found.
    """
    found: list[int] = []
    for _ in range(_MAX_TRIES):
        if len(found) == count:
            return found
        port = source.randint(_FIRST, _LAST)
        if port not in found and port not in kept and _is_free(host, port):
            found.append(port)
    raise CapacityError(f"{count} free ports from {_FIRST} to {_LAST} cannot be found at {host}")


def bound(host: str, port: int) -> socket.socket:
    """A TCP socket bound to `host`, an address or a name with an IPv4 address. A host with a colon, in brackets or not,
    is IPv6.

    Raises:
        OSError: the address is taken, or none of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # NOTE: with its protocol named, or asyncio leaves Nagle's algorithm on and each small frame waits 40 ms.
    opened = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind((host.strip("[]"), port))
    except OSError:
        opened.close()
        raise
    return opened


def _is_free(host: str, port: int) -> bool:
    try:
        bound(host, port).close()
    except OSError:
        return False
    return True
