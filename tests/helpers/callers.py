"""Clients that ask as whichever role may, for tests that play several: a client of each role, and its methods.

What a role must not ask is the matter of `tests/unit/rpc/test_permissions.py`.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence

from tandem.core.events import BlockEvent
from tandem.locality.base import PublishResult
from tandem.rpc.client import DEFAULT_TIMEOUT_S, RouterClient, WorkerClient
from tandem.rpc.messages import (
    ConfirmAnswer,
    ConfirmCall,
    Greeting,
    LeaseCall,
    LeaseUpdate,
    PrefillCall,
    PrefillUpdate,
    Registration,
    WorkerRecord,
    WorkerStatus,
)
from tests.helpers.secret import AS_GATEWAY, AS_OPERATOR, AS_ROUTER, AS_WORKER


class WorkerCaller(WorkerClient):
    """A gateway, a peer, a router and an operator in one."""

    def __init__(self, address: str) -> None:
        super().__init__(address, AS_GATEWAY)
        self._peer = WorkerClient(address, AS_WORKER)
        self._router = WorkerClient(address, AS_ROUTER)
        self._operator = WorkerClient(address, AS_OPERATOR)

    async def close(self) -> None:
        await asyncio.gather(super().close(), self._peer.close(), self._router.close(), self._operator.close())

    def watch(self, interval_s: float, *, timeout_s: float | None = None) -> AsyncGenerator[WorkerStatus, None]:
        return self._router.watch(interval_s, timeout_s=timeout_s)

    async def drain(self, *, timeout_s: float | None = DEFAULT_TIMEOUT_S) -> None:
        await self._operator.drain(timeout_s=timeout_s)

    def prefill(self, call: PrefillCall, *, timeout_s: float | None = None) -> AsyncGenerator[PrefillUpdate, None]:
        return self._peer.prefill(call, timeout_s=timeout_s)

    async def greet(self, greeting: Greeting, *, timeout_s: float | None = DEFAULT_TIMEOUT_S) -> Greeting:
        return await self._peer.greet(greeting, timeout_s=timeout_s)

    async def lease(self, call: LeaseCall, *, timeout_s: float | None = DEFAULT_TIMEOUT_S) -> LeaseUpdate:
        return await self._peer.lease(call, timeout_s=timeout_s)

    async def renew(self, lease_ids: Sequence[str], *, timeout_s: float | None = DEFAULT_TIMEOUT_S) -> Sequence[str]:
        return await self._peer.renew(lease_ids, timeout_s=timeout_s)

    async def confirm(self, call: ConfirmCall, *, timeout_s: float | None = DEFAULT_TIMEOUT_S) -> ConfirmAnswer:
        return await self._peer.confirm(call, timeout_s=timeout_s)

    async def release(self, lease_ids: Sequence[str], *, timeout_s: float | None = DEFAULT_TIMEOUT_S) -> None:
        await self._peer.release(lease_ids, timeout_s=timeout_s)


class RouterCaller(RouterClient):
    """A gateway and a worker in one."""

    def __init__(self, address: str) -> None:
        super().__init__(address, AS_GATEWAY)
        self._worker = RouterClient(address, AS_WORKER)

    async def close(self) -> None:
        await asyncio.gather(super().close(), self._worker.close())

    async def register(
        self, registration: Registration, *, timeout_s: float | None = DEFAULT_TIMEOUT_S
    ) -> Sequence[WorkerRecord]:
        return await self._worker.register(registration, timeout_s=timeout_s)

    async def unregister(self, worker: WorkerRecord, *, timeout_s: float | None = DEFAULT_TIMEOUT_S) -> None:
        await self._worker.unregister(worker, timeout_s=timeout_s)

    async def publish(
        self,
        worker_id: str,
        epoch: int,
        events: Sequence[BlockEvent],
        sequence: int,
        *,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
    ) -> PublishResult:
        return await self._worker.publish(worker_id, epoch, events, sequence, timeout_s=timeout_s)

    async def replace(
        self,
        worker_id: str,
        epoch: int,
        hashes: Sequence[bytes],
        sequence: int,
        *,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
    ) -> PublishResult:
        return await self._worker.replace(worker_id, epoch, hashes, sequence, timeout_s=timeout_s)
