"""Workers of one process on real loopback gRPC, and a middleman that stands before one of them and lies.

`until` waits for what must become true by itself; `at_rest` proves that a worker holds nothing for anybody.
"""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tandem.core.sampling_params import SamplingParams
from tandem.rpc.client import WorkerClient
from tandem.rpc.messages import (
    ConfirmAnswer,
    ConfirmCall,
    GenerateCall,
    GenerateUpdate,
    Greeting,
    LeaseCall,
    LeaseUpdate,
    PrefillCall,
    PrefillUpdate,
    WorkerAddress,
    WorkerStatus,
)
from tandem.rpc.network import RpcServer
from tandem.rpc.server import serve_worker
from tandem.transport.inproc import InprocRegistry
from tandem.worker.process import WorkerProcess, serving_worker
from tandem.worker.service import WorkerService
from tandem.worker.settings import DecodeSettings, PrefillSettings, WorkerSettings
from tandem.worker.sources import Sources
from tests.helpers.callers import WorkerCaller
from tests.helpers.secret import SECRET, serving_as

GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, seed=1)
SAMPLED = SamplingParams(temperature=1.0, top_p=0.9, max_tokens=10, ignore_eos=True, seed=11)
LONG = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True, seed=1)
TIMEOUT_S = 20.0


def settings_of(kind: type[WorkerSettings], path: Path, worker_id: str, **overrides: Any) -> WorkerSettings:
    """A small worker: blocks of 8 tokens, steps of 32, every block compared."""
    defaults: dict[str, Any] = {
        "model": str(path),
        "worker_id": worker_id,
        "dtype": "float32",
        "device": "cpu",
        "attention_backend": "reference",
        "native_kernels": False,
        "block_size": 8,
        "kv_cache_gib": 2 / 1024,
        "max_model_len": 256,
        "max_num_batched_tokens": 32,
        "max_num_running": 16,
        "num_threads": 1,
        "checksum_share": 1.0,
        "transport": "inproc",
        "cluster_secret": SECRET.decode(),
    }
    return kind(**{**defaults, **overrides})


@dataclass(frozen=True, slots=True)
class Pair:
    """A prefill and a decode worker, and the way to call each."""

    prefill: WorkerProcess
    decode: WorkerProcess
    to_prefill: WorkerClient
    to_decode: WorkerClient


@contextlib.asynccontextmanager
async def pair_of(path: Path, *, prefill: dict[str, Any] | None = None, **both: Any) -> AsyncIterator[Pair]:
    """Both serve for the time of the block. `prefill`: settings of that one only."""
    registry = InprocRegistry()
    async with contextlib.AsyncExitStack() as opened:
        p_settings = settings_of(PrefillSettings, path, "p0", **{**both, **(prefill or {})})
        p = await opened.enter_async_context(serving_worker(p_settings, registry))
        d_settings = settings_of(DecodeSettings, path, "d0", **both)
        d = await opened.enter_async_context(serving_worker(d_settings, registry))
        to_p = WorkerCaller(p.core.me.address)
        to_d = WorkerCaller(d.core.me.address)
        opened.push_async_callback(to_p.close)
        opened.push_async_callback(to_d.close)
        yield Pair(p, d, to_p, to_d)


def service_of(worker: WorkerProcess) -> WorkerService:
    """Its answers without gRPC between, for what depends on the very moment."""
    return WorkerService(worker.core, Sources(worker.core), worker.lifecycle, worker.reports)


def prompt_of(num_tokens: int, seed: int = 0) -> tuple[int, ...]:
    generator = random.Random(seed)
    return tuple(generator.randrange(6, 199) for _ in range(num_tokens))


async def generated(client: WorkerClient, call: GenerateCall) -> list[int]:
    """All tokens of a request."""
    async with asyncio.timeout(TIMEOUT_S):
        return [t async for update in client.generate(call) for t in update.output.token_ids]


async def until(condition: Callable[[], Awaitable[bool]], what: str, timeout_s: float = TIMEOUT_S) -> None:
    """Ask again and again."""
    try:
        async with asyncio.timeout(timeout_s):
            while not await condition():
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"not within {timeout_s} s: {what}") from None


async def is_at_rest(worker: WorkerProcess) -> bool:
    """Whether nothing runs, nothing is leased and nothing is transferring; the accounts are proved on the way."""
    await worker.core.engine.call(lambda engine: engine.check())
    load = await worker.core.engine.call(lambda engine: engine.load())
    usage = load.usage
    is_free = (usage.used, usage.leased, usage.transferring) == (0, 0, 0)
    return is_free and not load.num_requests and not len(worker.core.leases) and not worker.lifecycle.num_working


async def at_rest(*workers: WorkerProcess, timeout_s: float = TIMEOUT_S) -> None:
    for worker in workers:
        await until(lambda w=worker: is_at_rest(w), f"{worker.core.me.worker_id} at rest", timeout_s)  # type: ignore[misc]


Change = Callable[[PrefillUpdate], Awaitable[Sequence[PrefillUpdate]]]


async def unchanged(update: PrefillUpdate) -> Sequence[PrefillUpdate]:
    return [update]


async def at_once() -> None:
    """Waits for nothing."""


@dataclass(slots=True)
class Middleman:
    """A worker's handler that passes calls on to a real worker, and changes what the tests say.

    Args:
        real: the worker behind it.
        change: called with each update of a prefill.
        change_lease, change_confirm, change_greeting: what becomes of those answers.
        before_confirm: done when a read is over, before the worker is asked.
        before_lease: waited for before the worker is asked for a lease.
        silent: names of methods that never answer.
        calls: names of methods that were called, in order.
        renewed: the leases of each call to renew, in order.
    """

    real: WorkerClient
    change: Change = unchanged
    change_lease: Callable[[LeaseUpdate], LeaseUpdate] = lambda lease: lease
    change_confirm: Callable[[ConfirmAnswer], ConfirmAnswer] = lambda answer: answer
    change_greeting: Callable[[Greeting], Greeting] = lambda greeting: greeting
    before_confirm: Callable[[ConfirmCall], None] = lambda call: None
    before_lease: Callable[[], Awaitable[None]] = at_once
    silent: set[str] = field(default_factory=set)
    calls: list[str] = field(default_factory=list)
    released: list[str] = field(default_factory=list)
    renewed: list[tuple[str, ...]] = field(default_factory=list)

    async def _note(self, name: str) -> None:
        self.calls.append(name)
        if name in self.silent:
            await asyncio.Event().wait()

    async def status(self) -> WorkerStatus:
        return await self.real.status()

    async def watch(self, interval_s: float) -> AsyncIterator[WorkerStatus]:
        async for status in self.real.watch(interval_s):
            yield status

    async def drain(self) -> None:
        await self.real.drain()

    async def generate(self, call: GenerateCall) -> AsyncIterator[GenerateUpdate]:
        async for update in self.real.generate(call):
            yield update

    async def prefill(self, call: PrefillCall) -> AsyncIterator[PrefillUpdate]:
        await self._note("prefill")
        stream = self.real.prefill(call)
        try:
            async for update in stream:
                for changed in await self.change(update):
                    yield changed
        finally:
            await stream.aclose()

    async def greet(self, greeting: Greeting) -> Greeting:
        await self._note("greet")
        return self.change_greeting(await self.real.greet(greeting))

    async def lease(self, call: LeaseCall) -> LeaseUpdate:
        await self._note("lease")
        await self.before_lease()
        return self.change_lease(await self.real.lease(call))

    async def renew(self, lease_ids: Sequence[str]) -> Sequence[str]:
        self.renewed.append(tuple(lease_ids))
        await self._note("renew")
        return await self.real.renew(lease_ids)

    async def confirm(self, call: ConfirmCall) -> ConfirmAnswer:
        await self._note("confirm")
        self.before_confirm(call)
        return self.change_confirm(await self.real.confirm(call))

    async def release(self, lease_ids: Sequence[str]) -> None:
        await self._note("release")
        self.released += lease_ids
        await self.real.release(lease_ids)


@dataclass(frozen=True, slots=True)
class Front:
    """A middleman that serves. `worker`: what to call it by."""

    handler: Middleman
    server: RpcServer
    worker: WorkerAddress


@contextlib.asynccontextmanager
async def front_of(worker: WorkerProcess, worker_id: str | None = None, **changes: Any) -> AsyncIterator[Front]:
    """A middleman before `worker` for the time of the block, by its name or as a worker of its own."""
    client = WorkerCaller(worker.core.me.address)
    if worker_id is not None:
        changes["change_greeting"] = lambda g: replace(g, worker=replace(g.worker, worker_id=worker_id))
    handler = Middleman(client, **changes)
    server = await serve_worker(handler, "127.0.0.1:0", serving_as(worker.core.me.incarnation))
    try:
        me = worker.core.me
        yield Front(handler, server, WorkerAddress(worker_id or me.worker_id, server.address, me.incarnation))
    finally:
        await server.stop(0.0)
        await client.close()
