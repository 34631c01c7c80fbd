"""Links are measured by real reads, and a slow one is said to be slow."""

import logging
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from tandem.core.clock import ManualClock
from tandem.core.errors import TransportError
from tandem.transport.base import Peer
from tandem.transport.card import Identity
from tandem.transport.choose import LinkPath
from tandem.transport.inproc import InprocRegistry, InprocTransport
from tandem.transport.measure import LinkMeasurement, measure_link
from tandem.transport.transfer import Transfer
from tests.helpers.secret import SECRET
from tests.helpers.transport_pools import COMPATIBILITY, pool_of, seeded_pages

BLOCK_BYTES = 1 << 20
PEER = Peer("paced", "ab" * 16, 100, 1, 64)


class PacedTransport:
    """Takes a fixed time a read and a byte on a clock of its own; moves nothing."""

    name = "paced"

    def __init__(self, latency_s: float, bytes_per_s: float, fails: bool = False) -> None:
        self._latency_s, self._bytes_per_s, self._fails = latency_s, bytes_per_s, fails

    def read(
        self, peer: Peer, remote_blocks: Sequence[int], local_blocks: Sequence[int], deadline_s: float | None = None
    ) -> Transfer:
        clock = ManualClock()
        transfer = Transfer(len(remote_blocks) * BLOCK_BYTES, clock)
        clock.advance(self._latency_s + transfer.num_bytes / self._bytes_per_s)
        if self._fails:
            transfer.fail(TransportError("out of cable"))
        else:
            transfer.succeed()
        return transfer

    def card(self) -> bytes:
        return b""

    def connect(self, card: bytes) -> Peer:
        return PEER

    def disconnect(self, peer: Peer) -> None: ...

    def close(self) -> None: ...


def measure(transport: PacedTransport, num_blocks: int = 9) -> LinkMeasurement:
    blocks = range(1, 1 + num_blocks)
    return measure_link(transport, PEER, blocks, blocks, LinkPath.NETWORK, expected_gb_per_s=1.0)


def test_the_report_says_what_was_measured(caplog: pytest.LogCaptureFixture) -> None:
    report = measure(PacedTransport(0.0, 0.5e9))
    assert report.gb_per_s == pytest.approx(0.5)
    assert report.latency_s == pytest.approx(BLOCK_BYTES / 0.5e9)
    assert not report.is_slow
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_slow_link_is_reported_loudly_with_both_figures(caplog: pytest.LogCaptureFixture) -> None:
    assert measure(PacedTransport(0.0, 0.2e9)).is_slow
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    for words in ("SLOW", "0.20 GB/s measured", "1.00 GB/s expected", "tcp: network", PEER.incarnation):
        assert words in record.getMessage()


def test_a_failed_read_fails_the_measurement() -> None:
    with pytest.raises(TransportError, match="out of cable"):
        measure(PacedTransport(0.0, 1e9, fails=True))


@pytest.fixture
def pair() -> Iterator[tuple[InprocTransport, Peer]]:
    registry = InprocRegistry()
    pools = [pool_of(seeded_pages(seed, 32, 4096)) for seed in range(2)]
    reader, source = (InprocTransport(pool, Identity(COMPATIBILITY, SECRET), registry) for pool in pools)
    yield reader, reader.connect(source.card())
    reader.close()
    source.close()


def test_a_real_link(pair: tuple[InprocTransport, Peer]) -> None:
    """Too few bytes to judge the rate by, so it is not called slow."""
    transport, peer = pair
    report = measure_link(transport, peer, np.arange(1, 32).tolist(), range(1, 32), LinkPath.INPROC, 1e9)
    assert report.gb_per_s > 0
    assert 0 < report.latency_s < 1
    assert not report.is_slow
