"""Interfaces of the methods that workers and routers offer over gRPC; `server` exposes an implementation to clients.

Methods raise errors of `core.errors`; the caller gets the same class with the same message. A caller that goes away or
whose deadline passes cancels the method (asyncio.CancelledError). A lease is the promise of the worker that has some
blocks to a reader, another worker: until it is released or not renewed in time, these blocks keep their contents.
A reader calls `greet` to connect, `prefill` or `lease` for blocks, `renew` while its transport reads them, `confirm`
before it uses them, and `release`.
"""

from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from tandem.core.events import BlockEvent
from tandem.locality.base import PublishResult
from tandem.routing.settlement import Settlement
from tandem.rpc.messages import (
    ConfirmAnswer,
    ConfirmCall,
    Decision,
    GenerateCall,
    GenerateUpdate,
    Greeting,
    LeaseCall,
    LeaseUpdate,
    ModelInfo,
    PairCall,
    PairingAnswer,
    PrefillCall,
    PrefillUpdate,
    ProcessInfo,
    Registration,
    WorkerListing,
    WorkerRecord,
    WorkerStatus,
)


class WorkerHandler(Protocol):
    """Methods of a prefill or decode worker. Gateways call `generate`, routers and the planner `watch`; `prefill` and
    all from `greet` on are for workers that read its blocks (`permissions` has all callers).
    """

    async def status(self) -> WorkerStatus:
        """Current status; an answer also proves that the worker is alive."""
        ...

    def watch(self, interval_s: float) -> AsyncIterator[WorkerStatus]:
        """Status every `interval_s` seconds, and at once when the lifecycle changes, until the caller leaves."""
        ...

    async def drain(self) -> None:
        """Stops accepting requests, finishes running ones, then ends the process. Returns at once."""
        ...

    def generate(self, call: GenerateCall) -> AsyncIterator[GenerateUpdate]:
        """Serves a request; aborts it if the caller leaves.

        Raises:
            InvalidRequestError, CapacityError: it is not accepted.
            UnavailableError: this worker is draining or stopping; it generated nothing, or not all.
            WorkerLostError: `call.decode` names another incarnation than this one.
        """
        ...

    def prefill(self, call: PrefillCall) -> AsyncIterator[PrefillUpdate]:
        """Computes a prompt and leases its blocks to the caller, part by part; both end if the caller leaves. Raises as
        `generate`.
        """
        ...

    async def greet(self, greeting: Greeting) -> Greeting:
        """Exchanges identities and the means to read each other's blocks.

        Raises:
            IncompatiblePeerError: blocks of the two workers are not compatible; both sides' values are named.
        """
        ...

    async def lease(self, call: LeaseCall) -> LeaseUpdate:
        """Leases the cached blocks of the longest prefix of a chain of hashes; `num_tokens` is 0 if there are none."""
        ...

    async def renew(self, lease_ids: Sequence[str]) -> Sequence[str]:
        """Renews leases; returns the ids of those that are not valid (any more)."""
        ...

    async def confirm(self, call: ConfirmCall) -> ConfirmAnswer:
        """Returns whether a lease has been valid without interruption until now, and checksums of its blocks."""
        ...

    async def release(self, lease_ids: Sequence[str]) -> None:
        """Ends leases; unknown ones are ignored."""
        ...


class RouterHandler(Protocol):
    """Methods of the router. Gateways call `pair` and `settle`; workers of a deployment without Redis call `register`,
    `unregister`, `publish` and `replace`; the others show the router's state to gateways and tools.
    """

    async def pair(self, call: PairCall) -> PairingAnswer:
        """Chooses workers for a request.

        Raises:
            InvalidRequestError: no worker could ever serve it.
            CapacityError: all are full now; `retry_after_s` is computed from their queues.
            UnavailableError: no live worker serves the model.
        """
        ...

    async def settle(self, settlement: Settlement) -> None:
        """Receives the outcome of a request: its measured times."""
        ...

    async def describe(self) -> ProcessInfo:
        """Identity and resource usage of this router's process."""
        ...

    async def models(self) -> Sequence[ModelInfo]:
        """Models that live workers serve."""
        ...

    async def workers(self) -> Sequence[WorkerListing]:
        """All known workers, including dead ones until they are forgotten."""
        ...

    async def decisions(self, num_latest: int) -> Sequence[Decision]:
        """The latest decisions of this router with their outcomes, oldest first."""
        ...

    async def register(self, registration: Registration) -> Sequence[WorkerRecord]:
        """Registers a worker, which calls this every second. Returns all registered workers; none if
        `without_records`.
        """
        ...

    async def unregister(self, worker: "WorkerRecord") -> None:
        """Removes a worker that stops."""
        ...

    async def publish(self, worker_id: str, epoch: int, events: Sequence[BlockEvent], sequence: int) -> PublishResult:
        """Applies a worker's report to this router's own index, as `LocalityIndex.publish`."""
        ...

    async def replace(self, worker_id: str, epoch: int, hashes: Sequence[bytes], sequence: int) -> PublishResult:
        """Replaces all of a worker's blocks in this router's own index, as `LocalityIndex.replace`."""
        ...
