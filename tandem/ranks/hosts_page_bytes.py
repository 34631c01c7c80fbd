"""Computes checksums of KV pages, and checks their numbers, for a worker on several hosts.

Workers inspect blocks that they lend or receive by `compute.page_bytes.PageBytes`, which describes the methods. Here
each host inspects the pages that it has; the leader combines the results.
"""

from collections.abc import Sequence

from tandem.compute.page_bytes import LocalPageBytes, NumberParts, PagePart, joined_crc32
from tandem.core.errors import TransportError
from tandem.ranks.kv_messages import Inspect, Inspected
from tandem.ranks.remote import RemoteHost
from tandem.transport.base import MemoryPool

_INSPECT_S = 3.0  # until a host has answered

_Run = tuple[int, tuple[PagePart, ...]]  # host, parts that follow one another there


class HostsPageBytes:
    """Implements `PageBytes` on several hosts. State that all ranks share has a copy on each host; the copies must be
    equal.

    Args:
        own: of the leader's host.
        others: in the order of their parts of the pool.
    """

    def __init__(self, own: LocalPageBytes, pool: MemoryPool, others: Sequence[RemoteHost]) -> None:
        self._own, self._pool, self._others = own, pool, others

    def crc32s(self, wanted: Sequence[Sequence[PagePart]]) -> list[int]:
        if self._pool.num_ranks == 1:
            return self._of_copies(wanted)
        runs = [self._runs(parts) for parts in wanted]
        by_host: list[list[tuple[PagePart, ...]]] = [[] for _ in range(self._pool.num_hosts)]
        for host, parts in (run for each in runs for run in each):
            by_host[host].append(parts)
        found = [iter(each.crc32s) for each in self._inspected([Inspect(tuple(lists), ()) for lists in by_host])]
        return [self._joined([(next(found[host]), _size(parts)) for host, parts in each]) for each in runs]

    def are_finite(self, wanted: Sequence[NumberParts]) -> list[bool]:
        if self._pool.num_ranks == 1:
            asked = [Inspect((), tuple(wanted))] * self._pool.num_hosts
            return [all(each) for each in zip(*(found.are_finite for found in self._inspected(asked)), strict=True)]
        hosts = [self._host_of(each.rank) for each in wanted]
        asked = [
            Inspect((), tuple(each for each, at in zip(wanted, hosts, strict=True) if at == host))
            for host in range(self._pool.num_hosts)
        ]
        found = [iter(each.are_finite) for each in self._inspected(asked)]
        return [next(found[host]) for host in hosts]

    def _of_copies(self, wanted: Sequence[Sequence[PagePart]]) -> list[int]:
        found_there = self._inspected([Inspect(tuple(map(tuple, wanted)), ())] * self._pool.num_hosts)
        own = found_there.pop(self._pool.host)
        for other, found in zip(self._others, found_there, strict=True):
            if found != own:
                raise TransportError(f"{other.name} has another copy of what all ranks share: it is damaged")
        return list(own.crc32s)

    def _inspected(self, asked: Sequence[Inspect]) -> list[Inspected]:
        """Results of each host; all hosts work at the same time. Raises `TransportError`."""
        there = [each for host, each in enumerate(asked) if host != self._pool.host]
        futures = [
            other.ask(each) if each.crc32s or each.are_finite else None
            for other, each in zip(self._others, there, strict=True)
        ]
        here = asked[self._pool.host]
        own = Inspected(tuple(self._own.crc32s(here.crc32s)), tuple(self._own.are_finite(here.are_finite)))
        found: list[Inspected] = []
        for other, future, each in zip(self._others, futures, there, strict=True):
            if future is None:
                found.append(Inspected((), ()))
                continue
            try:
                answer = future.result(_INSPECT_S)
            except TimeoutError as error:
                raise TransportError(f"{other.name} has not looked at its pages within {_INSPECT_S:g} s") from error
            if not isinstance(answer, Inspected) or len(answer.crc32s) != len(each.crc32s):
                raise TransportError(f"{other.name} cannot look at its pages: {answer}")
            found.append(answer)
        found.insert(self._pool.host, own)
        return found

    def _host_of(self, rank: int) -> int:
        return rank * self._pool.num_hosts // self._pool.num_ranks

    def _runs(self, parts: Sequence[PagePart]) -> list[_Run]:
        runs: list[tuple[int, list[PagePart]]] = []
        for part in parts:
            host = self._host_of(part[0])
            if not runs or runs[-1][0] != host:
                runs.append((host, []))
            runs[-1][1].append(part)
        return [(host, tuple(found)) for host, found in runs]

    def _joined(self, found: Sequence[tuple[int, int]]) -> int:
        value = 0
        for crc32, num_bytes in found:
            value = joined_crc32(value, crc32, num_bytes)
        return value


def _size(parts: Sequence[PagePart]) -> int:
    return sum(end - start for _, _, start, end in parts)
