"""Checksums of several hosts are put together as if all pages were in one place; a host that fails is named."""

import random
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

import pytest
import torch

from tandem.compute.page_bytes import LocalPageBytes, NumberParts, PagePart
from tandem.core.errors import TransportError
from tandem.ranks.hosts_page_bytes import HostsPageBytes
from tandem.ranks.kv_messages import Failed, Inspect, Inspected, KVAnswer, KVCall
from tandem.transport.base import MemoryPool

NUM_BLOCKS, PAGE_BYTES = 6, 32


@dataclass
class FakeHost:
    """Stands in for a `RemoteHost` that has these pages."""

    name: str
    pages: torch.Tensor
    failure: str = ""

    def ask(self, call: KVCall) -> "Future[KVAnswer]":
        assert isinstance(call, Inspect)
        found, future = LocalPageBytes(self.pages), Future[KVAnswer]()
        crc32s, finite = tuple(found.crc32s(call.crc32s)), tuple(found.are_finite(call.are_finite))
        future.set_result(Failed(self.failure) if self.failure else Inspected(crc32s, finite))
        return future


def pool_of(pages: torch.Tensor, num_hosts: int, place: int) -> MemoryPool:
    size = len(pages) * NUM_BLOCKS
    return MemoryPool(
        pages.data_ptr(), PAGE_BYTES, size, "cpu", pages, num_ranks=len(pages), num_hosts=num_hosts, host=place
    )


def spread(pages: torch.Tensor, num_hosts: int, place: int = 0) -> tuple[HostsPageBytes, list[FakeHost]]:
    """Pages of all ranks, of which each host has its own alone; all of them have a single one. `place`: the own."""
    hosts = []
    for host in range(num_hosts):
        here = pages.clone()
        if len(pages) > 1:
            span = len(pages) // num_hosts
            here[: host * span] = 0
            here[(host + 1) * span :] = 0
        hosts.append(FakeHost(f"host {host}", here))
    own, others = hosts[place], hosts[:place] + hosts[place + 1 :]
    pool = pool_of(pages, num_hosts, place)
    return HostsPageBytes(LocalPageBytes(own.pages), pool, others), others  # type: ignore[arg-type]


def random_parts(rng: random.Random, num_ranks: int) -> Sequence[PagePart]:
    def part() -> PagePart:
        start, end = sorted(rng.sample(range(PAGE_BYTES + 1), 2))
        return rng.randrange(num_ranks), rng.randrange(NUM_BLOCKS), start, end

    return [part() for _ in range(rng.randrange(1, 7))]


@pytest.mark.parametrize(
    ("num_ranks", "num_hosts", "place"), [(2, 2, 0), (4, 2, 0), (4, 4, 0), (1, 3, 0), (2, 2, 1), (4, 4, 3), (4, 4, 1)]
)
def test_checksums_are_those_of_all_pages_in_one_place(num_ranks: int, num_hosts: int, place: int) -> None:
    rng = random.Random(num_ranks)
    pages = torch.frombuffer(bytearray(rng.randbytes(num_ranks * NUM_BLOCKS * PAGE_BYTES)), dtype=torch.uint8)
    pages = pages.view(num_ranks, NUM_BLOCKS, PAGE_BYTES)
    wanted = [random_parts(rng, num_ranks) for _ in range(20)]
    assert spread(pages, num_hosts, place)[0].crc32s(wanted) == LocalPageBytes(pages).crc32s(wanted)


@pytest.mark.parametrize("place", [0, 1])
def test_numbers_are_looked_at_where_they_are(place: int) -> None:
    pages = torch.zeros(4, NUM_BLOCKS, PAGE_BYTES, dtype=torch.uint8)
    pages[2, 1, :4].view(torch.float32)[0] = torch.nan
    found, _ = spread(pages, 2, place)
    parts = NumberParts(0, (1, 2), 0, 4, "float32")
    assert found.are_finite([replace(parts, rank=rank) for rank in (3, 2, 1, 0)]) == [True, False, True, True]


def test_copies_of_what_all_share_must_be_equal() -> None:
    found, (other,) = spread(torch.zeros(1, NUM_BLOCKS, PAGE_BYTES, dtype=torch.uint8), 2)
    assert len(found.crc32s([[(0, 1, 0, 8)]])) == 1
    other.pages[0, 1, 3] = 1
    with pytest.raises(TransportError, match="host 1 has another copy"):
        found.crc32s([[(0, 1, 0, 8)]])


def test_a_host_that_fails_is_named() -> None:
    found, (other,) = spread(torch.zeros(2, NUM_BLOCKS, PAGE_BYTES, dtype=torch.uint8), 2)
    other.failure = "it is lost"
    with pytest.raises(TransportError, match=r"host 1 cannot look at its pages: .*it is lost"):
        found.crc32s([[(1, 1, 0, 8)]])
    assert len(found.crc32s([[(0, 1, 0, 8)]])) == 1, "which it does not have to be asked for"
