"""Handlers that answer with what a test put into them, and what a real router and worker would never do."""

import asyncio
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from tandem.core.errors import WorkerStoppedError
from tandem.core.events import BlockEvent
from tandem.core.output import RequestOutput
from tandem.core.sampling_params import SamplingParams
from tandem.core.scope import UNSCOPED
from tandem.locality.base import PublishResult
from tandem.routing.settlement import Settlement
from tandem.routing.snapshot import Role, WorkerState
from tandem.rpc.context import incoming_traceparent
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
    WorkerAddress,
    WorkerListing,
    WorkerRecord,
    WorkerStatus,
)

HERE = WorkerAddress("d0", "127.0.0.1:1", "a")
MODEL = ModelInfo(name="m", fingerprint="f", max_model_len=64, vocab_size=9, block_size=16)
STATE = WorkerState(
    worker_id="d0",
    role=Role.DECODE,
    kind="k",
    fingerprint="f",
    block_size=16,
    block_bytes=1,
    chunk_tokens=1,
    num_total_blocks=4,
    num_free_blocks=4,
)
T = TypeVar("T")
STATUS = WorkerStatus(worker=HERE, pid=1, epoch=2, lifecycle="ready", state=STATE, model=MODEL)
LEASE = LeaseUpdate(lease_id="l", num_tokens=3, groups=(), is_last=True, ttl_s=1.0)
PROMPT = array("I", (1, 2))


def generate_call(seed: int = 0, num_tokens: int = 3, prompt: Sequence[int] = PROMPT) -> GenerateCall:
    params = SamplingParams(max_tokens=num_tokens, seed=seed)
    return GenerateCall(request_id="r1", prompt_token_ids=prompt, params=params, scope=UNSCOPED)


class Worker:
    """Records each call; `raises` is raised by every method; `generate` stops after `num_before_silence` tokens."""

    def __init__(self, raises: BaseException | None = None, num_before_silence: int | None = None) -> None:
        self.raises = raises
        self.num_before_silence = num_before_silence
        self.calls: list[Any] = []
        self.traceparents: list[str | None] = []
        self.started = asyncio.Event()
        self.cancelled = asyncio.Event()

    def _note(self, *call: Any) -> None:
        self.calls.append(call)
        self.traceparents.append(incoming_traceparent.get())
        if self.raises is not None:
            raise self.raises

    async def status(self) -> WorkerStatus:
        self._note("status")
        return STATUS

    async def watch(self, interval_s: float) -> AsyncIterator[WorkerStatus]:
        self._note("watch", interval_s)
        yield STATUS
        await self._silence()

    async def drain(self) -> None:
        self._note("drain")

    async def generate(self, call: GenerateCall) -> AsyncIterator[GenerateUpdate]:
        self._note("generate", call)
        assert call.params.max_tokens is not None
        for i in range(call.params.max_tokens):
            if i == self.num_before_silence:
                await self._silence()
            yield GenerateUpdate(RequestOutput(call.request_id, 0, (i,), "ab"))

    async def prefill(self, call: PrefillCall) -> AsyncIterator[PrefillUpdate]:
        self._note("prefill", call)
        yield PrefillUpdate(lease=LEASE)
        yield PrefillUpdate(num_cached_tokens=0)

    async def greet(self, greeting: Greeting) -> Greeting:
        self._note("greet", greeting)
        return greeting

    async def lease(self, call: LeaseCall) -> LeaseUpdate:
        self._note("lease", call)
        return LEASE

    async def renew(self, lease_ids: Sequence[str]) -> Sequence[str]:
        self._note("renew", lease_ids)
        return lease_ids[:1]

    async def confirm(self, call: ConfirmCall) -> ConfirmAnswer:
        self._note("confirm", call)
        return ConfirmAnswer(True, call.checksum_block_ids)

    async def release(self, lease_ids: Sequence[str]) -> None:
        self._note("release", lease_ids)
        if lease_ids == ("never",):
            await self._silence()

    async def _silence(self) -> None:
        self.started.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


class Router:
    """Records each call."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    async def pair(self, call: PairCall) -> PairingAnswer:
        self.calls.append(call)
        return PairingAnswer(decode=HERE, predicted_ms={"ttft": 0.0})

    async def settle(self, settlement: Settlement) -> None:
        self.calls.append(settlement)

    async def describe(self) -> ProcessInfo:
        return ProcessInfo(pid=7, incarnation="i", lifecycle="ready")

    async def models(self) -> Sequence[ModelInfo]:
        return (MODEL,)

    async def workers(self) -> Sequence[WorkerListing]:
        return (WorkerListing(status=STATUS, age_s=0.5, is_alive=True),)

    async def decisions(self, num_latest: int) -> Sequence[Decision]:
        return [Decision(request_id="r", age_s=0.5, policy="first")] * num_latest

    async def register(self, registration: Registration) -> Sequence[WorkerRecord]:
        return () if registration.without_records else (registration.record,) * 2

    async def unregister(self, worker: WorkerRecord) -> None:
        self.calls.append(worker)

    async def publish(self, worker_id: str, epoch: int, events: Sequence[BlockEvent], sequence: int) -> PublishResult:
        self.calls.append((worker_id, epoch, events, sequence))
        return PublishResult.RESYNC

    async def replace(self, worker_id: str, epoch: int, hashes: Sequence[bytes], sequence: int) -> PublishResult:
        self.calls.append((worker_id, epoch, hashes, sequence))
        return PublishResult.STALE


async def after_restart(ask: Callable[[], Awaitable[T]]) -> T:
    """The answer of a process that was stopped and started again at its address. On a busy machine a first request
    still meets the end of the former connection.
    """
    while True:
        with suppress(WorkerStoppedError):
            return await ask()


def run(check: Callable[[], Awaitable[None]]) -> None:
    """Run an async test; nothing here takes longer than 20 s."""

    async def bounded() -> None:
        await asyncio.wait_for(check(), 20)

    asyncio.run(bounded())
