"""Interface of transports: pools of blocks, peers, and reads from a peer's pool into the local one.

Here a *block* is one page of a worker's KV memory, or, between workers that divide state otherwise among ranks or
stages, a piece of one; an *incarnation* is one run of a worker's process. Blocks are addressed by index only and both
sides check the range, so no peer can access memory outside a pool. The owner of the destination starts and owns every
read (decode pulls). Imports neither torch nor grpc.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from tandem.core.errors import ConfigurationError
from tandem.transport.transfer import Transfer

NULL_BLOCK = 0  # index of the block that is never transferred


@dataclass(frozen=True, slots=True)
class MemoryPool:
    """Memory that blocks are read from and into: block `i` is `page_bytes` at `address + i * page_bytes`.

    Args:
        address: address of block 0, the null block, which is never transferred.
        page_bytes: size of a block.
        num_blocks: number of blocks, block 0 included; of all ranks together.
        device: "cpu" or "cuda:N".
        owner: object that keeps the memory alive as long as the pool.
        num_ranks: of the worker; each has an equal part of the blocks, one after the other.
        piece_bytes: unit in which workers with other ranks or stages read parts of pages; None = only whole pages are
            read.
        stages: numbers of layers with state in each pipeline stage; () = there are no stages.
        num_hosts: hosts among which the ranks are divided evenly. Each has room for all blocks, and fills those of its
            own ranks; where ranks share one part, each host has a copy of it.
        host: index of this host, in the order of the hosts' parts of the blocks.
    """

    address: int
    page_bytes: int
    num_blocks: int
    device: str
    owner: object = field(repr=False, compare=False)
    num_ranks: int = 1
    piece_bytes: int | None = None
    stages: tuple[int, ...] = ()
    num_hosts: int = 1
    host: int = 0

    def __post_init__(self) -> None:
        if self.address <= 0 or not 0 < self.page_bytes < 2**32 or not 2 <= self.num_blocks < 2**31:
            raise ConfigurationError(
                f"{self} is no pool: it needs an address, 1 to 2**32 - 1 bytes a block and at least one block beside"
                " the null block"
            )
        piece = self.piece_bytes or self.page_bytes
        if self.num_blocks % self.num_ranks or self.page_bytes % piece:
            raise ConfigurationError(f"{self} is no pool: ranks have equal numbers of blocks, and blocks whole pieces")
        if self.num_bytes // piece >= 2**31:
            raise ConfigurationError(
                f"a KV pool of {self.num_bytes / 2**30:.1f} GiB has too many pieces of {piece} bytes, in which workers "
                f"of other ranks read it; give a --kv-cache-gib below {2 * piece}"
            )
        if not 0 <= self.host < self.num_hosts or (self.num_ranks > 1 and self.num_ranks % self.num_hosts):
            raise ConfigurationError(f"{self} is no pool: hosts have equally many ranks")

    @property
    def num_bytes(self) -> int:
        return self.page_bytes * self.num_blocks

    @property
    def bytes_per_host(self) -> int:
        """Bytes that each host holds: consecutive parts in the order of hosts, or all if each host has a copy."""
        return self.num_bytes if self.num_ranks == 1 else self.num_bytes // self.num_hosts

    @property
    def held_bytes(self) -> range:
        """Range of the whole pool's bytes that this memory holds."""
        start = 0 if self.num_ranks == 1 else self.host * self.bytes_per_host
        return range(start, start + self.bytes_per_host)

    @property
    def is_cpu(self) -> bool:
        return self.device == "cpu"

    @property
    def device_index(self) -> int:
        """The N of "cuda:N"; 0 for the CPU."""
        return int(self.device.partition(":")[2] or 0)


@dataclass(frozen=True, slots=True)
class Peer:
    """A connection to one incarnation of a worker. A new connection is a new, unequal `Peer`.

    Args:
        num_blocks: how many blocks its pool has, in units of `unit_bytes`, block 0 included.
        unit_bytes: what an index stands for in reads of this peer, on both sides: a page, or a piece of one where the
            peer has other ranks or stages.
        num_ranks: of the peer, each of which has an equal part of `num_blocks`.
        stages: numbers of layers with state in each of its pipeline stages; () = there are none.
    """

    transport: str
    incarnation: str
    num_blocks: int
    connection: int
    unit_bytes: int
    num_ranks: int = 1
    stages: tuple[int, ...] = ()

    @property
    def parts(self) -> tuple[int, tuple[int, ...]]:
        """Division of the peer's state among ranks: (number of ranks, `stages`); equal ones have the same pages."""
        return self.num_ranks, self.stages


class KVTransport(Protocol):
    """Reads blocks of peers into the pool it was built with, and lets peers read that pool.

    Thread-safe. Errors are `TransportError`, or its subclass `IncompatiblePeerError` if retrying cannot help.
    """

    @property
    def name(self) -> str:
        """Name of the transport in cards and settings."""

    def card(self) -> bytes:
        """Returns this pool's card: the message by which a peer can reach the pool, authenticated with the cluster's
        secret.
        """

    def connect(self, card: bytes) -> Peer:
        """Verify a card, shake hands and prepare everything that is done once per peer. Takes up to seconds.

        Raises:
            IncompatiblePeerError: it must not be read from; every mismatch is named with both sides' values.
            TransportError: it cannot be reached.
        """

    def read(
        self,
        peer: Peer,
        remote_blocks: Sequence[int],
        local_blocks: Sequence[int],
        deadline_s: float | None = None,
    ) -> Transfer:
        """Start copying `remote_blocks[i]` of the peer into `local_blocks[i]`; does not wait for the bytes.

        Both count in units of `peer.unit_bytes`.

        Args:
            deadline_s: seconds from now after which the transfer fails; None = `max(3, 5 * bytes / measured rate)`,
                including the bytes of earlier reads of this peer that are still pending.

        Raises:
            TransportError: an index is out of range, null or repeated, the lists differ in length, or the peer is not
                connected. Later errors fail the transfer instead.
            CapacityError: too many reads of this peer are waiting.
        """

    def disconnect(self, peer: Peer) -> None:
        """Fail the peer's reads and remove it. Repeated calls do nothing."""

    def close(self) -> None:
        """Fail every read, stop serving and free all resources; after return the pool is neither read nor written."""
