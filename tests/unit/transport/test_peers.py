"""Deadlines of reads, and connected peers."""

import pytest

from tandem.core.errors import CapacityError, TransportError
from tandem.transport.card import Identity, describe
from tandem.transport.peers import ASSUMED_BYTES_PER_S, MAX_PENDING_READS, LinkPace, PeerTable
from tests.helpers.secret import SECRET
from tests.helpers.transport_pools import COMPATIBILITY, pool_of, seeded_pages

POOL = pool_of(seeded_pages(0, 4, 64))
CARD = describe("tcp", Identity(COMPATIBILITY, SECRET), POOL, b"")
MEGABYTE = 10**6


def test_small_reads_may_take_three_seconds() -> None:
    assert LinkPace().begin(1000) == 3.0


def test_an_unknown_link_is_taken_for_a_slow_one() -> None:
    assert LinkPace().begin(1000 * MEGABYTE) == pytest.approx(5 * 1000 * MEGABYTE / ASSUMED_BYTES_PER_S)


def test_the_allowance_follows_the_measured_rate_and_what_is_queued() -> None:
    pace = LinkPace()
    pace.begin(2000 * MEGABYTE)
    pace.end(2000 * MEGABYTE, 2.0)
    assert pace.begin(1000 * MEGABYTE) == pytest.approx(5.0)
    assert pace.begin(1000 * MEGABYTE) == pytest.approx(10.0)
    pace.end(1000 * MEGABYTE, None)
    assert pace.begin(1000 * MEGABYTE) == pytest.approx(10.0)


def test_latency_of_small_reads_says_nothing_about_the_rate() -> None:
    pace = LinkPace()
    pace.begin(2000 * MEGABYTE)
    pace.end(2000 * MEGABYTE, 2.0)
    pace.begin(100)
    pace.end(100, 1.0)
    assert pace.begin(1000 * MEGABYTE) == pytest.approx(5.0)


def test_the_reads_asked_of_a_peer_are_bounded() -> None:
    pace = LinkPace()
    for _ in range(MAX_PENDING_READS):
        pace.begin(1)
    with pytest.raises(CapacityError, match=f"{MAX_PENDING_READS} reads of one peer"):
        pace.begin(1)
    pace.end(1, None)
    pace.begin(1)


def test_a_new_connection_is_another_peer() -> None:
    table: PeerTable[str] = PeerTable("tcp", POOL)
    first, second = table.add(CARD, "first"), table.add(CARD, "second")
    assert first != second
    assert table.pop(first) == "first"
    assert table.pop(first) is None
    with pytest.raises(TransportError, match="not connected"):
        table.get(first)
    assert table.get(second) == "second"


def test_a_drained_table_stays_closed() -> None:
    table: PeerTable[str] = PeerTable("tcp", POOL)
    peer = table.add(CARD, "link")
    assert table.drain() == ["link"]
    with pytest.raises(TransportError, match="closed"):
        table.get(peer)
    with pytest.raises(TransportError, match="closed"):
        table.add(CARD, "late")
    assert table.drain() == []
