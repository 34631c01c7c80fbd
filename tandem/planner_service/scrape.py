"""Reads the counters of every gateway once per call; `traffic` computes the traffic from them.

A gateway that does not answer is reported as a problem, since its traffic is missing from the observation.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from tandem.core.errors import TandemError, UnavailableError
from tandem.planner_service.gateway_counts import GatewayCounts, parse_counts
from tandem.process.probe import get

_TIMEOUT_S = 3.0

FindGateways = Callable[[], Awaitable[Sequence[str]]]
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]


@dataclass(frozen=True, slots=True)
class Scrape:
    """Result of one scrape: counts by address, and messages on gateways and address look-ups that failed."""

    counts: dict[str, GatewayCounts]
    problems: tuple[str, ...]


async def resolve_host(host: str, port: int) -> Sequence[str]:
    """Returns every address of a host; only IPv4 ones if it has both kinds, which belong to the same gateways.

    Raises:
        OSError: it has none.
    """
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    families = {family for family, *_ in found}
    chosen = socket.AF_INET if socket.AF_INET in families else socket.AF_INET6
    return sorted({str(where[0]) for family, _, _, _, where in found if family == chosen})


class GatewayScraper:
    """Scrapes all gateways concurrently.

    Args:
        names: host:port; every address of a host is one gateway.
        find: returns further gateways, as host:port.
        timeout_s: timeout of one gateway, and of finding them.
    """

    def __init__(
        self,
        names: Sequence[str],
        find: FindGateways | None = None,
        *,
        timeout_s: float = _TIMEOUT_S,
        resolve: Resolve = resolve_host,
    ) -> None:
        self._names = tuple(names)
        self._find = find
        self._timeout_s = timeout_s
        self._resolve = resolve

    async def scrape(self) -> Scrape:
        """Scrape once. Failures of gateways, name servers and APIs are returned as problems, never raised."""
        problems: list[str] = []
        found = await asyncio.gather(*(self._named(name, problems) for name in self._names), self._found(problems))
        addresses = list(dict.fromkeys(address for addresses in found for address in addresses))
        if not addresses and not problems:
            problems.append("no gateway is there")
        answers = await asyncio.gather(*(self._counts(address, problems) for address in addresses))
        known = zip(addresses, answers, strict=True)
        return Scrape({address: counts for address, counts in known if counts is not None}, tuple(problems))

    async def _named(self, name: str, problems: list[str]) -> Sequence[str]:
        host, _, port = name.rpartition(":")
        try:
            async with asyncio.timeout(self._timeout_s):
                hosts = await self._resolve(host.strip("[]"), int(port))
        except (OSError, TimeoutError) as error:  # NOTE: a timeout has an empty message
            problems.append(f"gateways {name} cannot be found: {str(error) or 'the name server is silent'}")
            return ()
        return [f"[{one}]:{port}" if ":" in one else f"{one}:{port}" for one in hosts]

    async def _found(self, problems: list[str]) -> Sequence[str]:
        if self._find is None:
            return ()
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._find()
        except (TandemError, TimeoutError) as error:
            problems.append(f"gateways cannot be found: {str(error) or 'the Kubernetes API is silent'}")
            return ()

    async def _counts(self, address: str, problems: list[str]) -> GatewayCounts | None:
        try:
            answer = await get(f"http://{address}/metrics", self._timeout_s)
            if answer.status != 200:
                raise UnavailableError(f"its /metrics answers {answer.status}")
            return await asyncio.to_thread(parse_counts, answer.body.decode(errors="replace"))
        except TandemError as error:
            problems.append(f"gateway {address} is not counted: {error}")
            return None
