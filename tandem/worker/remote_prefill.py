"""Decode side of a hand-off: requests a prompt's KV and first token from a prefill worker, and pulls blocks meanwhile.

When a prefill worker fails, the next one is called; when none is left, the engine computes the missing part. At the end
the engine is told that no more KV will come, and again if it reserves blocks only after that. If it has no blocks for a
computed prompt within `ROOM_TIMEOUT_S`, the lease is given up: requests that occupy the blocks may be waiting for the
leased ones.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from dataclasses import replace
from functools import partial

from tandem.core.errors import InvalidRequestError, TandemError, TransportError
from tandem.core.machine import random_id
from tandem.core.output import RequestMetrics
from tandem.core.pins import Pin
from tandem.core.timeline import Stage
from tandem.rpc.messages import GenerateCall, LeaseUpdate, PrefillCall, PrefillUpdate, WorkerAddress
from tandem.rpc.prefill_messages import LeasedDraftState
from tandem.scheduler.output import KVReserved, SampledToken
from tandem.worker.core import WorkerCore
from tandem.worker.draft_states import drafter_of, fetch_draft_state, forget_draft_state
from tandem.worker.fetch import Fetch
from tandem.worker.source import KVSource
from tandem.worker.sources import Sources
from tandem.worker.tasks import ended

ROOM_TIMEOUT_S = 10.0  # until the engine has blocks for a computed prompt

logger = logging.getLogger(__name__)


class _NoRoomError(TransportError):
    """The engine has no blocks for KV that was computed elsewhere."""


class RemotePrefill:
    """Remote prefill of one request. Run `run` as a task; cancelling it ends everything that it began. Its owner sets
    `queued` once the engine has the request, which may take a second for a grammar; the engine gets no update before.

    Args:
        engine_id: the request's id in this worker's engine.
        timeline: receives the stages of this side and of the prefill worker.
    """

    def __init__(
        self, core: WorkerCore, sources: Sources, call: GenerateCall, engine_id: str, timeline: list[Stage]
    ) -> None:
        self._core = core
        self._sources = sources
        self._call = call
        self._engine_id = engine_id
        self._timeline = timeline
        self._fetch: asyncio.Future[Fetch] = asyncio.get_running_loop().create_future()
        self._is_over = False
        self.queued = asyncio.Event()
        self.num_cached_tokens: int | None = None
        self.pins: tuple[Pin, ...] = ()

    def completed(self, metrics: RequestMetrics) -> RequestMetrics:
        """Returns `metrics` completed by the prefill worker's figures. If this worker computed the prompt after all, it
        grants the pins.
        """
        if self.num_cached_tokens is None:
            return metrics
        own = any(pin.num_tokens for pin in metrics.pins)
        return replace(metrics, num_cached_tokens=self.num_cached_tokens, pins=metrics.pins if own else self.pins)

    def reserve(self, reserved: KVReserved) -> None:
        """Receives the blocks that the engine has reserved for the KV."""
        fetch = Fetch(self._core, reserved, self._timeline)
        if self._is_over:
            fetch.close()
            self._core.engine.note_kv_ended(self._engine_id, 0)  # NOTE: again: it may not have known the request
        else:
            self._fetch.set_result(fetch)

    async def run(self) -> None:
        """Obtains the KV from a prefill worker, or gives up; the engine continues either way."""
        try:
            for prefill in filter(None, (self._call.prefill, *self._call.spares)):
                if await self._succeeds(prefill):
                    return
        finally:
            self._finish()

    def _finish(self) -> None:
        self._is_over = True
        num_arrived = 0
        if self._fetch.done():
            num_arrived = self._fetch.result().num_arrived_tokens
            self._fetch.result().close()
        else:
            self._fetch.cancel()
        self._core.engine.note_kv_ended(self._engine_id, num_arrived)

    def forget(self) -> None:
        """Drops unused drafter states of the request. Call it when the request is over."""
        forget_draft_state(self._core, self._engine_id)

    async def _succeeds(self, prefill: WorkerAddress) -> bool:
        try:
            await self._get_from(prefill)
        except TandemError as error:
            logger.warning("request %s: worker %s failed: %s", self._call.request_id, prefill.worker_id, error)
            # NOTE: no other worker is asked: the request is invalid, there is no room here, or all KV has arrived
            return isinstance(error, InvalidRequestError | _NoRoomError) or self._is_complete
        return True

    async def _get_from(self, prefill: WorkerAddress) -> None:
        source = await self._sources.connect(prefill)
        lease_id = random_id()
        async with source.in_use(), aclosing(source.client.prefill(self._prefill_call(prefill, lease_id))) as stream:
            pulls: list[asyncio.Task[None]] = []
            try:
                await self._follow(stream, source, lease_id, pulls)
                if not source.is_broken:
                    await self._room()
                elif not self._fetch.done():  # NOTE: there may be room only once this lease has ended, see the module
                    raise TransportError(f"worker {prefill.worker_id} cannot be read from over this connection")
                await asyncio.gather(*pulls)
            finally:
                try:
                    await ended(*pulls)
                finally:  # NOTE: we may be cancelled in the line above, when the first token was the only one
                    source.release(lease_id)
        if not self._is_complete:
            raise TransportError(f"worker {prefill.worker_id} leased less than the request needs")

    async def _follow(
        self, stream: AsyncIterator[PrefillUpdate], source: KVSource, lease_id: str, pulls: list[asyncio.Task[None]]
    ) -> None:
        """Receives updates and pulls the leased blocks, to the end of the stream or until a pull fails."""
        with suppress(TimeoutError):
            async with asyncio.timeout(None) as reading:
                async for update in stream:
                    if update.lease is not None:
                        if update.lease.lease_id != lease_id:
                            raise TransportError(f"worker {source.worker.worker_id} gave another lease than {lease_id}")
                        source.keep(lease_id)
                    await self.queued.wait()
                    self._note(update)
                    if source.is_broken:  # NOTE: no read of it will succeed, so the rest is not waited for
                        break
                    if update.lease is not None:
                        self._core.engine.note_kv_offered(self._engine_id, 0)
                        pulls.append(asyncio.create_task(self._pull(source, update.lease)))
                        pulls[-1].add_done_callback(partial(_end_if_failed, reading))
                    if update.draft_state is not None:
                        pulls.append(asyncio.create_task(self._fetch_draft_state(source, lease_id, update.draft_state)))

    async def _room(self) -> None:
        """Waits until the engine has blocks for the computed KV.

        Raises:
            _NoRoomError: not in time. Requests that occupy the blocks may wait for prompts that no prefill worker can
                compute while this lease lasts, so the lease is given up and the prompt computed here.
        """
        try:
            async with asyncio.timeout(ROOM_TIMEOUT_S):
                await asyncio.shield(self._fetch)
        except TimeoutError:
            raise _NoRoomError(f"there was no room here for its KV within {ROOM_TIMEOUT_S} s") from None

    @property
    def _is_complete(self) -> bool:
        return self._fetch.done() and self._fetch.result().is_complete

    async def _pull(self, source: KVSource, lease: LeaseUpdate) -> None:
        fetch = await asyncio.shield(self._fetch)
        await fetch.pull(source, lease)
        self._core.engine.note_kv_offered(self._engine_id, fetch.num_arrived_tokens)

    async def _fetch_draft_state(self, source: KVSource, lease_id: str, leased: LeasedDraftState) -> None:
        stage = await fetch_draft_state(self._core, source, lease_id, leased, self._engine_id)
        if stage is not None:
            self._timeline.append(stage)

    def _note(self, update: PrefillUpdate) -> None:
        if update.num_cached_tokens is not None:  # NOTE: before the token, which may be the last
            self.num_cached_tokens, self.pins = update.num_cached_tokens, update.pins
        if update.token is not None:
            if update.token.token_id >= self._core.vocab_size:
                raise TransportError(f"token {update.token.token_id} is not among the model's {self._core.vocab_size}")
            self._core.engine.accept_token(self._engine_id, SampledToken(update.token.token_id, update.token.logprobs))
        self._timeline += update.timeline

    def _prefill_call(self, prefill: WorkerAddress, lease_id: str) -> PrefillCall:
        call = self._call
        return PrefillCall(
            request_id=call.request_id,
            reader=self._core.me,
            prompt_token_ids=call.prompt_token_ids,
            params=replace(call.params, speculate=None),  # NOTE: a prompt is computed without drafts
            output_token_ids=call.output_token_ids,
            priority=call.priority,
            scope=call.scope,
            prefill=prefill,
            fetch_from=call.fetch_from if prefill == call.prefill else None,
            num_fetch_blocks=call.num_fetch_blocks,
            lease_id=lease_id,
            pins=call.pins,
            drafter=drafter_of(self._core, call.params),
        )


def _end_if_failed(reading: asyncio.Timeout, pull: asyncio.Task[None]) -> None:
    """NOTE: after a failed read later updates are useless, so they are not awaited."""
    if not pull.cancelled() and pull.exception() is not None:
        with suppress(RuntimeError):  # it is over
            reading.reschedule(asyncio.get_running_loop().time())
