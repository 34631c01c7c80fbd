"""Transport between processes of one host, user and process-id namespace, by reading memory (cross memory attach).

`copies` has the queue of reads and their deadlines; this module finds a peer's memory and copies from it. The source
does not listen anywhere: the kernel lets only processes of the same user read its memory. Each call that copies blocks
also copies the source's proof, last: its incarnation, at an address named by its sealed card. So bytes are accepted
only from the process of the card and while its pool is open; a later process with the same process id has no such
proof.
"""

import ctypes
import json
import os
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from tandem.core.clock import Clock
from tandem.core.errors import ConfigurationError, IncompatiblePeerError, TransportError
from tandem.transport.base import MemoryPool, Peer
from tandem.transport.blocks import Run
from tandem.transport.card import Card, Identity, accept, describe, seal
from tandem.transport.copies import CopyTransport

_PR_SET_PTRACER = 0x59616D61
_LIBC = ctypes.CDLL(None, use_errno=True)

Buffers = NDArray[np.uint64]  # [num_buffers, 2]: address, bytes


@dataclass(frozen=True, slots=True)
class _Source:
    """Addresses of a peer's pool and proof. `incarnation`: the expected content of the proof."""

    incarnation: str
    pid: int
    pool: int
    proof: int

    def metadata(self) -> bytes:
        """Returns the metadata of the peer's card."""
        return json.dumps({"pid": self.pid, "pool": self.pool, "proof": self.proof}).encode()

    @staticmethod
    def of(card: Card) -> "_Source":
        """Parses a verified card. Raises `IncompatiblePeerError` if its metadata is invalid, a bug of the peer."""
        try:
            fields = json.loads(card.metadata)
            numbers = [int(fields[name]) for name in ("pid", "pool", "proof")]
            if not all(0 < number < 2**63 for number in numbers):
                raise ValueError(f"{numbers} are not a process id and two addresses")
        except (ValueError, KeyError, TypeError) as error:
            raise IncompatiblePeerError(f"the card of peer {card.incarnation} names no memory: {error}") from error
        return _Source(card.incarnation, *numbers)

    def copy_runs(self, pool: MemoryPool, runs: list[Run], unit_bytes: int) -> None:
        """Copy at most `copies.MAX_RUNS` runs of blocks of `unit_bytes` into `pool`; without runs, only checks that the
        peer can be read.

        Raises:
            TransportError: the bytes in `pool` must not be used.
        """
        found = ctypes.create_string_buffer(len(self.incarnation) // 2)
        parts = np.array(runs, dtype=np.uint64).reshape(-1, 3) * np.uint64(unit_bytes)
        local = _buffers(pool.address, parts[:, 1], parts[:, 2], ctypes.addressof(found), len(found))
        remote = _buffers(self.pool, parts[:, 0], parts[:, 2], self.proof, len(found))
        num_bytes, moved = int(local[:, 1].sum()), _read_memory(self.pid, local, remote)
        if moved < 0:
            number = ctypes.get_errno()
            raise TransportError(f"peer {self.incarnation}, process {self.pid}, is not readable: {os.strerror(number)}")
        if moved != num_bytes or found.raw.hex() != self.incarnation:
            raise TransportError(
                f"peer {self.incarnation} has closed its pool, or process {self.pid} is another one now:"
                f" {moved} of {num_bytes} bytes came"
            )


class CmaTransport(CopyTransport):
    """`KVTransport` among processes of one user on one host.

    Args:
        pool: CPU memory.
        identity: who we are.

    Raises:
        ConfigurationError: the pool is not CPU memory, or this system has no such calls or forbids them.
    """

    name = "cma"

    def __init__(self, pool: MemoryPool, identity: Identity, clock: Clock | None = None) -> None:
        self._pool, self._identity = pool, identity
        self._proof = ctypes.create_string_buffer(bytes.fromhex(identity.incarnation), len(identity.incarnation) // 2)
        _check_support(self._source())
        _let_siblings_read()
        super().__init__(pool, clock)

    def card(self) -> bytes:
        return seal(describe(self.name, self._identity, self._pool, self._source().metadata()), self._identity)

    def connect(self, card: bytes) -> Peer:
        accepted = accept(card, self.name, self._identity, self._pool)
        source = _Source.of(accepted)
        source.copy_runs(self._pool, [], self._pool.page_bytes)
        return self._add(accepted, partial(source.copy_runs, self._pool))

    def close(self) -> None:
        ctypes.memset(self._proof, 0, len(self._proof))
        super().close()

    def _source(self) -> _Source:
        return _Source(self._identity.incarnation, os.getpid(), self._pool.address, ctypes.addressof(self._proof))


def _buffers(
    base: int, offsets: NDArray[np.uint64], lengths: NDArray[np.uint64], last_address: int, last_bytes: int
) -> Buffers:
    """Returns buffers of pieces of a pool, followed by one more buffer. [num_buffers, 2]"""
    buffers = np.empty((len(offsets) + 1, 2), dtype=np.uint64)
    buffers[:-1, 0] = offsets + np.uint64(base)
    buffers[:-1, 1] = lengths
    buffers[-1] = last_address, last_bytes
    return buffers


def _read_memory(pid: int, local: Buffers, remote: Buffers) -> int:
    """Calls process_vm_readv; returns the bytes copied, or -1 with `errno` set. Releases the interpreter lock."""
    read = _LIBC.process_vm_readv
    read.restype = ctypes.c_ssize_t
    pointers = [(ctypes.c_void_p(b.ctypes.data), ctypes.c_ulong(len(b))) for b in (local, remote)]
    moved: int = read(ctypes.c_int(pid), *pointers[0], *pointers[1], ctypes.c_ulong(0))
    return moved


def _check_support(own: _Source) -> None:
    """Read our own proof as a peer would."""
    try:
        own.copy_runs(MemoryPool(own.pool, 1, 2, "cpu", None), [], 1)
    except (AttributeError, TransportError) as error:
        raise ConfigurationError(f"the cma transport needs Linux's process_vm_readv, use tcp: {error}") from error


def _let_siblings_read() -> None:
    """If Yama lets only ancestors read a process (ptrace_scope=1), also allow our parent and what it has started.

    Without Yama this does nothing.
    """
    if hasattr(_LIBC, "prctl"):
        unused = ctypes.c_ulong(0)
        _LIBC.prctl(_PR_SET_PTRACER, ctypes.c_ulong(os.getppid()), unused, unused, unused)
