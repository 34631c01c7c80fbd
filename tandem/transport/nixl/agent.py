"""NIXL agent: typed interface of the native calls used, all from one thread.

`destroy` is the only way to stop a transfer: releasing a handle does not. Every agent has a new name, because damaged
metadata can make a name unusable in a peer's process for ever.
"""

import contextlib
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tandem.core.errors import ConfigurationError, TransportError
from tandem.transport.base import MemoryPool
from tandem.transport.blocks import Indices
from tandem.transport.nixl.bindings import load_bindings
from tandem.transport.nixl.exposure import check_exposure, listeners

PROGRESS_DELAY_US = 10_000  # between two turns of NIXL's progress thread
IDENTITY_BYTES = 64  # by which a peer is recognised; it is read from its memory
NUM_PROBES = 32  # connections that can be under way at once


@dataclass(frozen=True, slots=True)
class Region:
    """Adjacent pieces of registered memory of equal size, addressed by index."""

    address: int
    piece_bytes: int
    num_pieces: int
    memory: str  # DRAM or VRAM
    device_index: int

    def row(self) -> NDArray[np.uint64]:
        """[1, 5]: NIXL's strided descriptor."""
        fields = [self.address, self.piece_bytes, self.device_index, self.piece_bytes, self.num_pieces]
        return np.array([fields], dtype=np.uint64)


def region_of(pool: MemoryPool) -> Region:
    """The memory of a pool, as NIXL describes memory."""
    memory = "DRAM" if pool.is_cpu else "VRAM"
    return Region(pool.address, pool.page_bytes, pool.num_blocks, memory, pool.device_index)


@dataclass(frozen=True, slots=True)
class RemoteAgent:
    """Local handle of a peer's agent: prepared descriptors of its pool and of its identity."""

    name: str
    pool: int
    identity: int


class NixlAgent:
    """Registers the pool and a few bytes that identify this process, and reads from peers.

    Args:
        bind_host: beside loopback, the only address at which UCX may listen, if the environment lets it listen at all.

    Raises:
        ConfigurationError: NIXL is not available, does not start here, or listens elsewhere.
    """

    def __init__(self, pool: MemoryPool, identity: bytes, bind_host: str) -> None:
        self.name = uuid.uuid4().hex
        self._nixl = load_bindings()
        self._errors = _error_classes(self._nixl)
        self._handles: set[int] = set()
        self._remotes: set[RemoteAgent] = set()
        self._scratch = np.zeros((1 + NUM_PROBES, IDENTITY_BYTES), dtype=np.uint8)  # row 0: what peers read
        self._scratch[0, : len(identity)] = np.frombuffer(identity, dtype=np.uint8)
        self.pool = region_of(pool)
        self.identity = Region(self._scratch.ctypes.data, IDENTITY_BYTES, 1 + NUM_PROBES, "DRAM", 0)
        others = listeners()
        try:
            self._agent = self._create()
            self._local = {region: self._prepare("", region) for region in (self.pool, self.identity)}
            self.metadata = bytes(self._agent.getLocalMD())
        except self._errors as error:
            raise ConfigurationError(f"NIXL does not start on this machine: {error}") from error
        try:
            check_exposure(listeners() - others, bind_host)
        except ConfigurationError:
            self.destroy()
            raise

    def _create(self) -> Any:
        config = self._nixl.nixlAgentConfig()
        config.useProgThread, config.useListenThread = True, False
        config.syncMode = self._nixl.NIXL_THREAD_SYNC_STRICT
        config.pthrDelay = PROGRESS_DELAY_US
        agent = self._nixl.nixlAgent(self.name, config)
        agent.createBackend("UCX", {})
        for region in (self.pool, self.identity):
            area = (region.address, region.piece_bytes * region.num_pieces, region.device_index, "")
            agent.registerMem(self._nixl.nixlRegDList(self._segment(region), [area]), [])
        self._agent = agent
        return agent

    def _segment(self, region: Region) -> Any:
        return self._nixl.VRAM_SEG if region.memory == "VRAM" else self._nixl.DRAM_SEG

    def _prepare(self, agent_name: str, region: Region) -> int:
        owner = agent_name or self._nixl.NIXL_INIT_AGENT
        handle: int = self._agent.prepXferDlist(owner, self._segment(region), region.row(), [])
        return handle

    def add_remote(self, name: str, metadata: bytes, pool: Region, identity: Region) -> RemoteAgent:
        """Load a peer's verified metadata and prepare its descriptors; raises `TransportError`."""
        try:
            loaded: bytes = self._agent.loadRemoteMD(metadata)
            remote = RemoteAgent(name, self._prepare(name, pool), self._prepare(name, identity))
        except self._errors as error:
            raise TransportError(f"NIXL cannot reach agent {name}: {error}") from error
        assert loaded.decode() == name
        self._remotes.add(remote)
        return remote

    def remove_remote(self, remote: RemoteAgent) -> None:
        """Remove a peer that has no read in flight."""
        if remote in self._remotes:
            self._remotes.remove(remote)
            for descriptors in (remote.pool, remote.identity):
                with contextlib.suppress(*self._errors):
                    self._agent.releasedDlistH(descriptors)
            if all(other.name != remote.name for other in self._remotes):
                with contextlib.suppress(*self._errors):  # NOTE: NIXL itself forgets a peer that it found dead
                    self._agent.invalidateRemoteMD(remote.name)

    def read_blocks(self, remote: RemoteAgent, remote_blocks: Indices, local_blocks: Indices) -> int:
        """Start a read into the pool and return its handle; on some paths the call itself copies."""
        return self._start(self._local[self.pool], local_blocks, remote.pool, remote_blocks)

    def read_identity(self, remote: RemoteAgent, probe: int) -> int:
        """Start reading a peer's identity into row `probe`; returns the handle."""
        return self._start(
            self._local[self.identity], np.array([probe]), remote.identity, np.array([0], dtype=np.int64)
        )

    def identity_read(self, probe: int) -> bytes:
        """Returns the identity that `read_identity` has read."""
        return bytes(self._scratch[probe])

    def _start(self, local: int, local_indices: Indices, remote: int, remote_indices: Indices) -> int:
        indices = local_indices.astype(np.int32), remote_indices.astype(np.int32)
        try:
            handle: int = self._agent.makeXferReq(
                self._nixl.NIXL_READ, local, indices[0], remote, indices[1], "", [], False
            )
        except self._errors as error:
            raise TransportError(f"NIXL refused a read: {error}") from error
        self._handles.add(handle)
        try:
            self._agent.postXferReq(handle, "")
        except self._errors as error:
            self.release(handle)
            raise TransportError(f"NIXL failed a read: {error}") from error
        return handle

    def is_done(self, handle: int) -> bool:
        """Whether a read has completed; raises `TransportError` if it failed. Call `release` in both cases."""
        try:
            status = self._agent.getXferStatus(handle)
        except self._errors as error:
            raise TransportError(f"NIXL lost the peer or the read: {error}") from error
        return bool(status == self._nixl.NIXL_SUCCESS)

    def release(self, handle: int) -> None:
        """Free the handle of a read that has ended."""
        self._handles.discard(handle)
        with contextlib.suppress(*self._errors):
            self._agent.releaseXferReq(handle)

    def destroy(self) -> None:
        """Free all resources; after return no read of this agent can write any more. The agent is then unusable."""
        for handle in list(self._handles):
            self.release(handle)
        for remote in list(self._remotes):
            self.remove_remote(remote)
        for descriptors in self._local.values():
            with contextlib.suppress(*self._errors):
                self._agent.releasedDlistH(descriptors)
        del self._agent


def _error_classes(nixl: ModuleType) -> tuple[type[Exception], ...]:
    names = [name for name in dir(nixl) if name.startswith("nixl") and name.endswith("Error")]
    return (*(getattr(nixl, name) for name in names), RuntimeError)


@dataclass(frozen=True, slots=True)
class AgentAddress:
    """Content of a card for NIXL, beside NIXL's own metadata."""

    name: str
    pool: Region
    identity: Region

    def to_fields(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_fields(fields: Mapping[str, Any]) -> "AgentAddress":
        return AgentAddress(fields["name"], Region(**fields["pool"]), Region(**fields["identity"]))
