"""A router and a decode worker that answer at once, as a process of their own: what is left is the gateway.

    python -m bench.instant_backend MODEL NUM_TOKENS TOKENS_PER_STEP STEP_S SHARED

The worker makes a token (or TOKENS_PER_STEP) of every request in a step, and a step takes STEP_S; 0 = as fast as it is
sent. SHARED 0: it is of a version that gives every request a call of its own. Prints the router's address and serves
until its input ends.
"""

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from tandem.core.errors import InvalidRequestError
from tandem.core.output import RequestMetrics, RequestOutput
from tandem.core.types import FinishReason
from tandem.routing.settlement import Settlement
from tandem.routing.snapshot import Role, WorkerState
from tandem.rpc.credentials import Credentials, ProcessRole
from tandem.rpc.messages import (
    Decision,
    GenerateCall,
    GenerateUpdate,
    ModelInfo,
    PairCall,
    PairingAnswer,
    ProcessInfo,
    WorkerAddress,
    WorkerListing,
    WorkerStatus,
)
from tandem.rpc.server import serve_router, serve_worker

MAX_MODEL_LEN = 2 * 2**20
VOCAB_SIZE = 4096
SECRET = b"shared with the gateway"
HANGING_TOKEN = 4000  # a prompt that begins with it gets one word, then nothing until its caller goes
AS_GATEWAY, AS_ROUTER, AS_WORKER = (
    Credentials(SECRET, role) for role in (ProcessRole.GATEWAY, ProcessRole.ROUTER, ProcessRole.BOTH)
)


def _info(model: str) -> ModelInfo:
    return ModelInfo(
        name=model,
        fingerprint="f" * 32,
        max_model_len=MAX_MODEL_LEN,
        vocab_size=VOCAB_SIZE,
        block_size=16,
        num_decode=1,
    )


class _Rest:
    """Everything else that the services have: not called here."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        async def refuse(*_: object) -> None:
            raise InvalidRequestError(f"{name} is not served by a benchmark's stand-in")

        return refuse


class Steps:
    """An engine's steps, which all requests share."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s
        self._next = asyncio.Event()

    async def run(self) -> None:
        while True:
            await asyncio.sleep(self._step_s)
            ended, self._next = self._next, asyncio.Event()
            ended.set()

    async def end(self) -> None:
        """Until the present one ends."""
        if self._step_s:
            await self._next.wait()
        else:
            await asyncio.sleep(0)


class InstantWorker(_Rest):
    """Says the same word `num_tokens` times, `per_step` at a time."""

    def __init__(self, model: str, num_tokens: int, per_step: int, steps: Steps | None = None) -> None:
        self._model = model
        self._messages = [(start, min(start + per_step, num_tokens)) for start in range(0, num_tokens, per_step)]
        self._steps = steps or Steps(0.0)

    async def status(self) -> WorkerStatus:
        state = WorkerState(
            worker_id="instant", role=Role.DECODE, kind="", fingerprint="f" * 32, block_size=16, block_bytes=1,
            chunk_tokens=1, num_total_blocks=1, num_free_blocks=1,
        )  # fmt: skip
        address = WorkerAddress("instant", "127.0.0.1:1")
        return WorkerStatus(
            worker=address, pid=os.getpid(), epoch=1, lifecycle="ready", state=state, model=_info(self._model)
        )

    async def generate(self, call: GenerateCall) -> AsyncIterator[GenerateUpdate]:
        for start, end in self._messages:
            await self._steps.end()
            is_last = end == self._messages[-1][1]
            output = RequestOutput(
                call.request_id,
                0,
                tuple(range(100, 100 + end - start)),
                " word" * (end - start),
                finish_reason=FinishReason.LENGTH if is_last else None,
                metrics=RequestMetrics(0.0, 0.0, 0.0, 0.0, len(call.prompt_token_ids), end, 0, 0) if is_last else None,
            )
            yield GenerateUpdate(output)
            if call.prompt_token_ids[0] == HANGING_TOKEN:
                await asyncio.Event().wait()


class HangingWorker(InstantWorker):
    """Says one word, then nothing until its caller goes; `gone_s`: when, by the machine's monotonic clock."""

    def __init__(self, model: str) -> None:
        super().__init__(model, 2, 1)
        self.gone_s: list[float] = []

    async def generate(self, call: GenerateCall) -> AsyncIterator[GenerateUpdate]:
        try:
            async for update in super().generate(call):
                yield update
                await asyncio.Event().wait()
        finally:
            self.gone_s.append(time.monotonic())


class InstantRouter(_Rest):
    """Always pairs with the one worker."""

    def __init__(self, model: str, worker: str) -> None:
        self._info = _info(model)
        self._answer = PairingAnswer(decode=WorkerAddress("instant", worker), policy="instant", fingerprint="f" * 32)

    async def pair(self, call: PairCall) -> PairingAnswer:
        if not call.token_ids:
            raise InvalidRequestError("no tokens")
        return self._answer

    async def settle(self, settlement: Settlement) -> None: ...

    async def describe(self) -> ProcessInfo:
        return ProcessInfo(pid=os.getpid(), incarnation="first", lifecycle="ready")

    async def models(self) -> Sequence[ModelInfo]:
        return [self._info]

    async def workers(self) -> Sequence[WorkerListing]:
        return []

    async def decisions(self, num_latest: int) -> Sequence[Decision]:
        return []


async def _serve(model: str, num_tokens: int, per_step: int, step_s: float, *, is_shared: bool) -> None:
    steps = Steps(step_s)
    instant = InstantWorker(model, num_tokens, per_step, steps)
    worker = await serve_worker(instant, "127.0.0.1:0", AS_WORKER, is_shared=is_shared)
    router = await serve_router(InstantRouter(model, worker.address), "127.0.0.1:0", AS_ROUTER)
    ticking = asyncio.create_task(steps.run()) if step_s else None
    sys.stdout.write(f"{router.address}\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    if ticking is not None:
        ticking.cancel()
    await router.stop(0)
    await worker.stop(0)


if __name__ == "__main__":
    asyncio.run(
        _serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), is_shared=sys.argv[5] != "0")
    )
