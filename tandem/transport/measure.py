"""Measures a link's speed by short timed reads at start-up, and compares it with the speed expected of its medium.

Moves bytes into blocks that the caller lends; knows no transport by name.
"""

import logging
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tandem.core.errors import TransportError
from tandem.transport.base import KVTransport, Peer
from tandem.transport.choose import LinkPath
from tandem.transport.transfer import Transfer, TransferState

NUM_LATENCY_READS = 10  # of one block each
NUM_RATE_READS = 5  # of all blocks; the best counts
MEASURABLE_BYTES = 1 << 20  # below, the rate says more about latency than about the path
SLOW_SHARE = 0.25  # of the expected rate, below which a link is slow
READ_DEADLINE_S = 5.0  # of each read

# GB/s of large reads: the first four measured on two cores of a 2024 server, the others a quarter of common hardware.
EXPECTED_GB_PER_S = {
    LinkPath.INPROC: 8.0,
    LinkPath.CMA: 4.0,
    LinkPath.NIXL_CMA: 4.0,
    LinkPath.LOOPBACK: 2.5,
    LinkPath.NETWORK: 1.0,
    LinkPath.RDMA: 10.0,
    LinkPath.CUDA_IPC: 50.0,
    LinkPath.UNKNOWN_NIXL: 1.0,
}

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LinkMeasurement:
    """Measured link: rate of its best read in GB/s (1e9 bytes), and median time of a single block in seconds."""

    path: LinkPath
    gb_per_s: float
    latency_s: float
    expected_gb_per_s: float
    is_slow: bool


def measure_link(
    transport: KVTransport,
    peer: Peer,
    remote_blocks: Sequence[int],
    local_blocks: Sequence[int],
    path: LinkPath,
    expected_gb_per_s: float | None = None,
    on_transfer: Callable[[Transfer], None] = lambda _: None,
) -> LinkMeasurement:
    """Read `remote_blocks` into `local_blocks` a few times, and warn if that is far slower than expected of `path`.

    Takes milliseconds on a good link, at most the deadlines of 16 reads on a bad one. Warns only if the blocks together
    have at least `MEASURABLE_BYTES`. `on_transfer` is called with every read before it is waited for: if one fails, the
    local blocks may still be written until that read is over.

    Raises:
        TransportError: a read failed.
    """

    def timed_read(num_blocks: int) -> tuple[int, float]:
        """(bytes, seconds) of one read."""
        transfer = transport.read(peer, remote_blocks[:num_blocks], local_blocks[:num_blocks], READ_DEADLINE_S)
        on_transfer(transfer)
        transfer.wait()
        if transfer.state is not TransferState.DONE or transfer.finished_s is None:
            raise TransportError(f"measuring the link to peer {peer.incarnation} failed: {transfer.error}")
        return transfer.num_bytes, max(transfer.finished_s - transfer.started_s, 1e-9)

    timed_read(len(local_blocks))  # NOTE: the first read of a peer also sets things up
    singles = [timed_read(1)[1] for _ in range(NUM_LATENCY_READS)]
    reads = [timed_read(len(local_blocks)) for _ in range(NUM_RATE_READS)]
    num_bytes, best_s = min(reads, key=lambda read: read[1])
    expected = EXPECTED_GB_PER_S[path] if expected_gb_per_s is None else expected_gb_per_s
    rate = num_bytes / best_s / 1e9
    is_slow = num_bytes >= MEASURABLE_BYTES and rate < SLOW_SHARE * expected
    report = LinkMeasurement(path, rate, statistics.median(singles), expected, is_slow)
    _log(peer, report)
    return report


def _log(peer: Peer, report: LinkMeasurement) -> None:
    log = logger.warning if report.is_slow else logger.info
    log(
        "KV transfers from incarnation %s by %s: %.2f GB/s measured, %.2f GB/s expected, %.0f us a block%s",
        peer.incarnation,
        report.path,
        report.gb_per_s,
        report.expected_gb_per_s,
        report.latency_s * 1e6,
        "; SLOW, so first tokens come late: check the network, and that transfers were meant to take this path"
        if report.is_slow
        else "",
    )
