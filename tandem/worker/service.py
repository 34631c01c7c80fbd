"""`WorkerHandler` over one engine: a worker's answers to gateways, routers and peers, described in `rpc.handlers`.

Prefill and decode workers are equal; the router decides which of a worker's methods are called. `generate` and
`prefill` run a request in the engine, and meanwhile a helper (`RemotePrefill`, `PrefixFetch`), which fetches KV from
another worker or the host tier into blocks that the engine reserves. Blocks read by other workers are leased to them:
`prefill` and `lease` begin a lease, `renew` and `release` prolong and end it, and `confirm` tells after a read whether
it was valid throughout.
"""

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import count

from tandem.architecture.shards import WIDTHS
from tandem.core.errors import CapacityError, InvalidRequestError, TransportError, WorkerLostError, shown
from tandem.core.hashing import extend_hashes, root_hash
from tandem.core.machine import random_id
from tandem.core.output import RequestOutput
from tandem.core.scope import CacheScope
from tandem.core.speculate import OFF
from tandem.core.token_ids import joined
from tandem.core.types import FinishReason
from tandem.engine.async_engine import EngineUpdate
from tandem.engine.engine import Engine
from tandem.kvcache.block_table import BlockRange
from tandem.rpc.context import incoming_traceparent
from tandem.rpc.messages import (
    ComputeCall,
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
from tandem.rpc.prefill_messages import ChosenToken
from tandem.rpc.protocols import PROTOCOL_VERSION
from tandem.scheduler.output import KVComputed, KVReserved
from tandem.scheduler.request import Handoff
from tandem.telemetry.log import request_context
from tandem.worker.core import WorkerCore
from tandem.worker.draft_states import forget_draft_state, is_wanted, lent_draft_state
from tandem.worker.lifecycle import Lifecycle
from tandem.worker.prefix_fetch import PrefixFetch
from tandem.worker.remote_prefill import RemotePrefill
from tandem.worker.reports import Reports
from tandem.worker.sources import Sources, check_compatible
from tandem.worker.stopwatch import Stopwatch
from tandem.worker.tasks import ended

_LEASE_ID = re.compile("[0-9a-f]{32}")


class WorkerService:
    """Serves the calls of one worker. Has no state of requests: the engine has it, and `core.leases` that of leases.

    Args:
        sources: connections to the workers that KV is read from.
        lifecycle: whether work is accepted; `drain` changes it.
        reports: its status for routers.
    """

    def __init__(self, core: WorkerCore, sources: Sources, lifecycle: Lifecycle, reports: Reports) -> None:
        self._core = core
        self._sources = sources
        self._lifecycle = lifecycle
        self._reports = reports
        self._numbers = count(1)

    async def status(self) -> WorkerStatus:
        return self._reports.latest()

    async def watch(self, interval_s: float) -> AsyncGenerator[WorkerStatus, None]:
        receiver = self._reports.subscribe()
        try:
            while True:
                told = self._lifecycle.state
                yield receiver.latest()
                if self._lifecycle.state is told:  # NOTE: it may change while the report is sent
                    await self._lifecycle.changed_within(interval_s)
        finally:
            self._reports.unsubscribe(receiver)

    async def drain(self) -> None:
        self._lifecycle.drain()

    async def generate(self, call: GenerateCall) -> AsyncIterator[GenerateUpdate]:
        self._admit(call.decode)
        with self._lifecycle.working(), self._traced("generate", call.request_id):
            update = self._generate(call)
            try:
                async for item in update:
                    yield item
            finally:
                await update.aclose()

    async def _generate(self, call: GenerateCall) -> AsyncGenerator[GenerateUpdate, None]:
        is_remote = call.prefill is not None and call.params.prompt_logprobs is None
        watch = self._stopwatch("wait for kv" if is_remote else "prefill")
        engine_id = self._engine_id(call.request_id)
        tokens = joined(call.prompt_token_ids, call.output_token_ids)
        num_expected = len(tokens) if is_remote else await self._num_restorable(call, tokens)
        handoff = Handoff(call.output_token_ids, num_expected_tokens=num_expected, pins=call.pins)
        remote = RemotePrefill(self._core, self._sources, call, engine_id, watch.stages) if is_remote else None
        tasks = [] if remote is None else [asyncio.create_task(remote.run())]
        fetch: PrefixFetch | None = None
        stream = self._stream(call, engine_id, handoff, None if remote is None else remote.queued.set)
        try:
            async for update in stream:
                if isinstance(update, KVReserved) and remote is not None:
                    remote.reserve(update)
                elif isinstance(update, KVReserved):
                    fetch = PrefixFetch(self._core, self._sources, update, watch.stages)
                    tasks.append(fetch.start(None, partial(self._hashes, tokens[:num_expected], call.scope)))
                elif isinstance(update, RequestOutput):
                    yield self._told(call, self._with_whole_metrics(call, update, remote or fetch), watch)
        finally:
            await stream.aclose()
            try:
                await ended(*tasks)
            finally:  # NOTE: we may be cancelled again in the line above
                if remote is not None:
                    remote.forget()

    def _with_whole_metrics(
        self, call: ComputeCall, output: RequestOutput, helper: RemotePrefill | PrefixFetch | None
    ) -> RequestOutput:
        """Completes an output's metrics, if it has any, by what `helper` knows: tokens cached and pins granted at the
        prefill worker, or tokens fetched. None: no KV was fetched.
        """
        metrics = output.metrics
        if metrics is None:
            return output
        if output.finished:
            self._core.metrics.observe_pins(call.pins, metrics, self._core.block_size)
        if isinstance(helper, RemotePrefill):
            metrics = helper.completed(metrics)
        elif helper is not None:
            num_found = min(helper.num_arrived_tokens, metrics.num_prompt_tokens)
            metrics = replace(metrics, num_cached_tokens=max(metrics.num_cached_tokens, num_found))
        return replace(output, metrics=metrics)

    def _told(self, call: GenerateCall, output: RequestOutput, watch: Stopwatch) -> GenerateUpdate:
        """Converts an output of the engine to an update for the gateway, and counts it in the metrics."""
        output = replace(output, request_id=call.request_id)
        self._core.metrics.observe_tokens(len(output.token_ids), watch.token(output))
        if not output.finished:
            return GenerateUpdate(output, watch.until_first_token(output))
        if output.metrics is not None and output.finish_reason is not None:
            self._core.metrics.observe_request(output.metrics, output.finish_reason)
        return GenerateUpdate(output, watch.all_stages(output))

    async def prefill(self, call: PrefillCall) -> AsyncIterator[PrefillUpdate]:
        self._admit(call.prefill)
        with self._lifecycle.working(), self._traced("prefill", call.request_id):
            lease_id = call.lease_id or random_id()
            self._require_free(lease_id)
            update = self._prefill(call, lease_id)
            is_whole = False
            try:
                async for item in update:
                    yield item
                is_whole = True
            finally:
                try:
                    await update.aclose()
                finally:  # NOTE: we may be cancelled again in the line above
                    if not (is_whole and self._core.leases.is_valid(lease_id)):
                        self._core.leases.end(lease_id)
                        # NOTE: what was leased after the lease had ended by its time would be held for ever.
                        self._core.engine.post(lambda engine: engine.kv.drop(lease_id))

    async def _prefill(self, call: PrefillCall, lease_id: str) -> AsyncGenerator[PrefillUpdate, None]:
        watch = self._stopwatch("prefill")
        engine_id = self._engine_id(call.request_id)
        num_fetched = call.num_fetch_blocks * self._core.block_size if call.fetch_from is not None else 0
        tokens = joined(call.prompt_token_ids, call.output_token_ids)
        num_found = max(num_fetched, await self._num_restorable(call, tokens))
        handoff = Handoff(
            call.output_token_ids,
            num_new_tokens=1,
            num_expected_tokens=min(num_found, (len(tokens) - 1) // self._core.block_size * self._core.block_size),
            lease_id=lease_id,
            pins=call.pins,
        )
        tasks: list[asyncio.Task[None]] = []
        fetch: PrefixFetch | None = None
        is_leased, has_drafts = False, is_wanted(self._core, call)
        if not has_drafts:  # NOTE: a state that nobody would read is not computed
            call = replace(call, params=replace(call.params, speculate=OFF))
        stream = self._stream(call, engine_id, handoff)
        try:
            async for update in stream:
                if isinstance(update, KVReserved):
                    shared = tokens[: handoff.num_expected_tokens]
                    fetch = PrefixFetch(self._core, self._sources, update, watch.stages)
                    tasks.append(fetch.start(call.fetch_from, partial(self._hashes, shared, call.scope)))
                elif isinstance(update, KVComputed):
                    if not is_leased:  # NOTE: not before, since a reader can only renew a lease that it knows of
                        self._core.leases.open(lease_id)
                        is_leased = True
                    yield PrefillUpdate(lease=self._lease_update(update, watch))
                else:
                    whole = self._with_whole_metrics(call, update, fetch)
                    yield self._chosen(whole, watch)
                    if has_drafts:
                        state = await lent_draft_state(self._core, engine_id, lease_id)
                        yield PrefillUpdate(draft_state=state)
                    if whole.metrics is not None and whole.finish_reason is not None:
                        self._core.metrics.observe_request(whole.metrics, whole.finish_reason)
                        yield PrefillUpdate(timeline=watch.all_stages(whole))
        finally:
            await stream.aclose()
            try:
                await ended(*tasks)
            finally:  # NOTE: we may be cancelled again in the line above
                forget_draft_state(self._core, engine_id)

    def _stream(
        self,
        call: ComputeCall,
        engine_id: str,
        handoff: Handoff,
        on_queued: Callable[[], object] | None = None,
    ) -> AsyncGenerator[EngineUpdate, None]:
        return self._core.engine.stream(
            call.prompt_token_ids,
            call.params,
            request_id=engine_id,
            priority=call.priority,
            scope=call.scope,
            handoff=handoff,
            on_queued=on_queued,
        )

    def _lease_update(self, update: KVComputed, watch: Stopwatch) -> LeaseUpdate:
        if not self._core.leases.is_valid(update.lease_id):
            raise TransportError(f"lease {update.lease_id} was not renewed in time; its reader is thought to be gone")
        self._core.leases.grant(update.lease_id, update.groups)
        watch.chunk(update.num_tokens)
        return LeaseUpdate(
            lease_id=update.lease_id,
            num_tokens=update.num_tokens,
            groups=update.groups,
            is_last=update.is_last,
            ttl_s=self._core.leases.ttl_s,
        )

    def _chosen(self, output: RequestOutput, watch: Stopwatch) -> PrefillUpdate:
        """Converts the engine's only output of a prefill to the update with the first token after the prompt. Raises
        CapacityError if the prompt could not be computed.
        """
        if output.finish_reason is FinishReason.ERROR:
            raise CapacityError(f"the prompt could not be computed: {output.stop_reason}")
        self._core.metrics.observe_tokens(len(output.token_ids), watch.token(output))
        logprobs = output.logprobs[0] if output.logprobs else None
        # NOTE: an answer that a grammar ends before it begins has none, where the model has no end token.
        token = ChosenToken(output.token_ids[0], logprobs) if output.token_ids else None
        metrics = output.metrics
        assert metrics is not None, "the one token is the last"
        return PrefillUpdate(token=token, num_cached_tokens=metrics.num_cached_tokens, pins=metrics.pins)

    async def greet(self, greeting: Greeting) -> Greeting:
        check_compatible(self._core.compatibility, greeting)
        return await asyncio.to_thread(self._core.greeting, PROTOCOL_VERSION)

    async def lease(self, call: LeaseCall) -> LeaseUpdate:
        self._lifecycle.require_ready()
        self._require_free(call.lease_id)
        self._core.leases.open(call.lease_id)
        try:
            num_blocks, groups = await self._core.engine.call(lambda engine: _hold_cached(engine, call))
        except BaseException:  # NOTE: a caller that leaves cancels this; without it the lease would not end
            self._core.leases.end(call.lease_id)
            raise
        if num_blocks == 0:
            self._core.leases.end(call.lease_id)
        self._core.leases.grant(call.lease_id, groups)
        num_tokens = num_blocks * self._core.block_size
        return LeaseUpdate(
            lease_id=call.lease_id, num_tokens=num_tokens, groups=groups, is_last=True, ttl_s=self._core.leases.ttl_s
        )

    async def renew(self, lease_ids: Sequence[str]) -> Sequence[str]:
        return self._core.leases.renew(lease_ids)

    async def confirm(self, call: ConfirmCall) -> ConfirmAnswer:
        """NOTE: validity is checked after the pages were read; only then they cannot have been reused before."""
        num_ranks = 1 if call.reader_ranks is None else call.reader_ranks
        stages, num_states = call.reader_stages, self._core.ranked.whole.num_layers
        if num_ranks not in [width * max(1, len(stages)) for width in WIDTHS]:
            raise InvalidRequestError(
                f"reader_ranks={num_ranks} must be one of {', '.join(map(str, WIDTHS))} for each of its stages"
            )
        if stages and sum(stages) != num_states:
            raise InvalidRequestError(f"reader_stages={stages} must have {num_states} states in all")
        blocks = self._core.leases.covered(call.lease_id, call.checksum_block_ids)
        if blocks is None:
            return ConfirmAnswer(False)
        checksums = await asyncio.to_thread(self._core.checksums.as_read, blocks, (num_ranks, stages))
        is_valid = self._core.leases.is_valid(call.lease_id)
        return ConfirmAnswer(is_valid, tuple(checksums) if is_valid else ())

    async def release(self, lease_ids: Sequence[str]) -> None:
        for lease_id in lease_ids:
            self._core.leases.end(lease_id)

    def _stopwatch(self, before_first_token: str) -> Stopwatch:
        return Stopwatch(self._core.me.worker_id, before_first_token, self._core.clock, self._core.num_ranks)

    def _admit(self, meant: WorkerAddress | None) -> None:
        """Refuses calls for another incarnation, and calls after draining began.

        Raises:
            WorkerLostError, UnavailableError: naming which.
        """
        me = self._core.me
        if meant is not None and meant.incarnation not in ("", me.incarnation):
            raise WorkerLostError(
                f"worker {me.worker_id} at {me.address} is incarnation {me.incarnation} now, not {meant.incarnation}"
            )
        self._lifecycle.require_ready()

    @contextmanager
    def _traced(self, name: str, request_id: str) -> Iterator[None]:
        """Opens a span in the caller's trace, and adds the request's id to every log line."""
        attributes = {"tandem.request_id": request_id}
        with self._core.tracing.span(name, incoming_traceparent.get(), attributes), request_context(request_id):
            yield

    def _require_free(self, lease_id: str) -> None:
        """Refuses a lease id that could collide with another hold of the engine.

        Raises:
            InvalidRequestError, CapacityError: it has not the form of a lease id, or is in use.
        """
        if not _LEASE_ID.fullmatch(lease_id):
            raise InvalidRequestError(f"lease_id={shown(lease_id)} must be 32 hexadecimal digits")
        if self._core.leases.is_valid(lease_id):
            raise CapacityError(f"lease_id={shown(lease_id)} is taken; choose another", 0.0)

    def _engine_id(self, request_id: str) -> str:
        """A unique id: the same request may arrive twice, and remains of the first must not be confused with the
        second.
        """
        return f"{request_id[:200]} ({next(self._numbers)})"

    async def _num_restorable(self, call: ComputeCall, tokens: Sequence[int]) -> int:
        """Leading tokens whose KV is complete once its part in the host tier is copied back; 0 = there is nothing to
        copy.
        """
        host = self._core.host
        if host is None or not host.has_moved or call.params.prompt_logprobs is not None:
            return 0
        hashes = await self._hashes(tokens[:-1], call.scope)
        num_blocks = await self._core.engine.call(lambda engine: engine.kv.pinned.num_restorable(hashes))
        return num_blocks * self._core.block_size

    async def _hashes(self, token_ids: Sequence[int], scope: CacheScope) -> list[bytes]:
        model = self._reports.model
        root = root_hash(scope, model_fingerprint=model.fingerprint, block_size=self._core.block_size)
        hashes: list[bytes] = []
        await asyncio.to_thread(extend_hashes, root, hashes, token_ids, self._core.block_size)
        return hashes


def _hold_cached(engine: Engine, call: LeaseCall) -> tuple[int, tuple[BlockRange, ...]]:
    return engine.kv.hold_cached(call.lease_id, call.block_hashes)
