"""Free ports of this machine for processes that will be started, and started again, at the same address."""

import random
import socket

from tandem.core.errors import CapacityError

# NOTE: below the range from which systems take ports of outgoing connections: one of those may hold a port for as long
# as it lives, and a process that is started again would find its own port taken.
_FIRST, _LAST = 15000, 32000
_MAX_TRIES = 10_000


def free_ports(count: int, host: str, source: random.Random) -> list[int]:
    """`count` different ports that nobody listens at now.

    Raises:
        CapacityError: none were found.
    """
    found: list[int] = []
    for _ in range(_MAX_TRIES):
        if len(found) == count:
            return found
        port = source.randint(_FIRST, _LAST)
        if port not in found and _is_free(host, port):
            found.append(port)
    raise CapacityError(f"{count} free ports from {_FIRST} to {_LAST} cannot be found at {host}")


def _is_free(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True
