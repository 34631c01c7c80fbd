"""Serves one choice (one answer to one prompt) from its pairing with workers to its last token, across worker failures.

Invariant: the client receives the same tokens as from one worker that never failed; a replacement continues after the
tokens generated so far. Attempts and waiting time are bounded. Never writes to a client.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial

from tandem.core.clock import Clock
from tandem.core.errors import (
    CapacityError,
    EngineStoppedError,
    IncompatibleProtocolError,
    TandemError,
    UnavailableError,
    UntrustedPeerError,
    WorkerLostError,
    shown,
)
from tandem.core.output import RequestMetrics, RequestOutput
from tandem.core.timeline import Stage
from tandem.core.token_ids import joined
from tandem.core.types import FinishReason
from tandem.gateway.history import RequestRecord
from tandem.gateway.metrics import GatewayMetrics
from tandem.gateway.pairing_queue import LEVEL_S, PairingQueue
from tandem.gateway.pairing_queues import PairingQueues
from tandem.gateway.request import ChoiceEnd, ChoiceRequest, ServeRequest
from tandem.gateway.routers import Routers
from tandem.gateway.stalls import StallWatch
from tandem.gateway.update_queue import UpdateQueue
from tandem.routing.queue_place import QueuePlace
from tandem.rpc.client import ClientPool, WorkerClient
from tandem.rpc.messages import GenerateCall, GenerateUpdate, PairCall, PairingAnswer, WorkerAddress

_REFUSED_FOR_GOOD = (UntrustedPeerError, IncompatibleProtocolError)

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class JourneyContext:
    """Parts of the gateway that journeys share.

    Args:
        max_attempts: workers tried for one choice, the first included.
        pairing_ids: endless, and unique among all gateways (`RequestShape.pairing_id`).
    """

    routers: Routers
    workers: ClientPool[WorkerClient]
    stalls: StallWatch
    metrics: GatewayMetrics
    clock: Clock
    max_attempts: int
    queues: PairingQueues
    pairing_ids: Iterator[str]


class Journey:
    """Serves `choice` of `request`; call `run` once, from its own task."""

    def __init__(
        self,
        context: JourneyContext,
        request: ServeRequest,
        choice: ChoiceRequest,
        record: RequestRecord,
        queue: UpdateQueue,
    ) -> None:
        self._context = context
        self._request = request
        self._choice = choice
        self._record = record
        self._queue = queue
        self._started_s = context.clock.now_s()
        self._token_ids: list[int] = []
        self._first_s: float | None = None
        self._last_s: float | None = None
        self._ended_s: float | None = None
        self._failed: list[tuple[WorkerAddress, TandemError]] = []
        self._final: RequestOutput | None = None
        self._stages: tuple[Stage, ...] = ()
        self._fingerprint: str | None = None
        self.router: str | None = None
        self.pairing_id = next(context.pairing_ids)

    async def run(self) -> None:
        """Serves until the last token.

        Raises:
            TandemError: it cannot be served, or not to its end.
        """
        while self._final is None:
            pairing = await (self._pair_again() if self._failed else self._pair())
            try:
                await self._follow(pairing)
            except (CapacityError, UnavailableError, EngineStoppedError) as error:
                if self._final is None:
                    self._give_up_on(pairing.decode, error)

    def end(self, error: BaseException | None) -> ChoiceEnd:
        """Result of the choice. `error`: the error that ended the request; None for success or a client that left."""
        final = self._final
        reason = final.finish_reason if final is not None else None
        stopped = FinishReason.ABORT if error is None else FinishReason.ERROR
        return ChoiceEnd(
            index=self._choice.index,
            reason=reason or stopped,
            num_prompt_tokens=len(self._choice.prompt_token_ids),
            num_output_tokens=len(self._token_ids),
            num_failovers=len(self._failed),
            ttft_s=None if self._first_s is None else self._first_s - self._started_s,
            metrics=self._metrics(),
            stages=self._stages,
            error=None if error is None or reason is not None else str(error),
            tpot_s=self._tpot_s(),
            duration_s=None if self._ended_s is None else self._ended_s - self._started_s,
        )

    def _tpot_s(self) -> float | None:
        if self._first_s is None or self._last_s is None or len(self._token_ids) < 2:
            return None
        return (self._last_s - self._first_s) / (len(self._token_ids) - 1)

    def _metrics(self) -> RequestMetrics | None:
        return None if self._final is None else self._final.metrics

    async def _pair(self) -> PairingAnswer:
        """The first pairing. Queues while all workers are full, and for a worker while there is none."""
        return await self._once_possible(self._anybody)

    async def _pair_again(self) -> PairingAnswer:
        """A pairing after a failure. Once a worker was lost, waits for one that can continue.

        NOTE: skips the queue of requests that wait for full workers: this client already has part of its answer.
        """
        try:
            if all(isinstance(error, CapacityError) for _, error in self._failed):
                return await self._paired(lambda: self._another(None))
            return await self._once_possible(self._another)
        except (CapacityError, UnavailableError) as error:
            raise self._refusal(error) from error

    async def _once_possible(self, question: Callable[[PairingQueue], Awaitable[PairingAnswer]]) -> PairingAnswer:
        """Pairs once suitable workers exist. NOTE: of requests with equal needs only the first asks a router."""
        needs = (self._required_fingerprint, frozenset(_ids(self._failed)), self._request.local_prefill)
        return await self._context.queues.run(
            needs,
            bool(self._failed),
            self._request.priority,
            lambda queue: self._paired(partial(question, queue)),
            self._record,
        )

    async def _paired(self, question: Callable[[], Awaitable[PairingAnswer]]) -> PairingAnswer:
        with self._record.timed("pair", unless=(CapacityError, UnavailableError)) as attributes:
            answer = await question()
            attributes.update(_described(answer))
        self._fingerprint = answer.fingerprint or None
        self._record.workers.append(answer.decode.worker_id)
        return answer

    async def _anybody(self, queue: PairingQueue) -> PairingAnswer:
        self.router, answer = await self._context.routers.pair(self._pair_call((), queue))
        return answer

    async def _another(self, queue: PairingQueue | None) -> PairingAnswer:
        """Pairs with workers that have not failed; else with one that restarted or answers again."""
        try:
            self.router, answer = await self._context.routers.pair(self._pair_call(_ids(self._failed), queue))
            return answer
        except (CapacityError, UnavailableError):
            full = _ids(failed for failed in self._failed if isinstance(failed[1], CapacityError))
            self.router, answer = await self._context.routers.pair(self._pair_call(full, queue))
            if await self._may_go_on(answer.decode):
                return answer
            raise

    async def _may_go_on(self, worker: WorkerAddress) -> bool:
        """Whether a worker that failed may be used again.

        NOTE: a worker that was lost, or took no work for a while, may be back. One that does not trust us, or speaks
        another protocol, would refuse again.
        """
        errors = [error for failed, error in self._failed if failed == worker]
        if not errors:
            return True
        may_be_back = isinstance(errors[-1], UnavailableError) and not isinstance(errors[-1], _REFUSED_FOR_GOOD)
        return may_be_back and await self._context.stalls.is_back(worker)

    @property
    def _required_fingerprint(self) -> str | None:
        """Fingerprint of the model whose tokens the client has; None before the first token."""
        return self._fingerprint if self._token_ids else None

    def _pair_call(self, excluded: tuple[str, ...], queue: PairingQueue | None) -> PairCall:
        """NOTE: routers let a request that lost its worker go first: its client may have a part of its answer."""
        place = QueuePlace(
            queue="" if queue is None else queue.name,
            waited_s=self._context.clock.now_s() - self._started_s - self._request.priority * LEVEL_S,
            others_wait=queue is not None and queue.others_wait,
            is_retry=bool(self._failed),
        )
        return PairCall(
            request_id=self._choice.request_id,
            model=self._request.model,
            token_ids=joined(self._choice.prompt_token_ids, self._token_ids),
            num_expected_output=max(1, self._request.num_expected_output - len(self._token_ids)),
            scope=self._request.scope,
            session_id=self._request.session_id,
            excluded=excluded,
            local_prefill=self._request.local_prefill,
            fingerprint=self._required_fingerprint,
            place=place,
            pairing_id=self.pairing_id,
        )

    def _refusal(self, error: TandemError) -> TandemError:
        """NOTE: if the last worker was full or rejected us, that is reported instead of a lack of workers."""
        _, failure = self._failed[-1]
        return failure if isinstance(failure, (CapacityError, *_REFUSED_FOR_GOOD)) else error

    async def _follow(self, pairing: PairingAnswer) -> None:
        """Forwards a worker's updates until its stream ends; raises WorkerLostError if it dies or stalls before."""
        worker = pairing.decode
        client = self._context.workers.get(worker.address)
        timeout = asyncio.timeout(None)
        with self._context.stalls.listen(worker, timeout) as listening:
            try:
                async with timeout, aclosing(client.serve(self._call(pairing))) as stream:
                    async for update in stream:
                        listening.heard_s = self._context.clock.now_s()
                        await self._take(update, listening.heard_s, worker)
            except TimeoutError:
                raise WorkerLostError(listening.lost or f"worker {worker.worker_id} went silent") from None
        if self._final is None:
            raise WorkerLostError(f"worker {worker.worker_id} at {worker.address} ended the stream early")

    def _call(self, pairing: PairingAnswer) -> GenerateCall:
        """NOTE: prompt logprobs arrive with the first token; a worker that continues after it cannot compute them."""
        params = self._choice.params
        return GenerateCall(
            request_id=self._choice.request_id,
            prompt_token_ids=self._choice.prompt_token_ids,
            params=replace(params, prompt_logprobs=None) if self._token_ids else params,
            output_token_ids=tuple(self._token_ids),
            priority=self._request.priority,
            scope=self._request.scope,
            decode=pairing.decode,
            prefill=pairing.prefill,
            spares=pairing.spares,
            fetch_from=pairing.fetch_from,
            num_fetch_blocks=pairing.num_fetch_blocks,
            pins=self._request.pins,
        )

    async def _take(self, update: GenerateUpdate, now_s: float, worker: WorkerAddress) -> None:
        output = update.output
        if output.finish_reason is FinishReason.ABORT:
            raise WorkerLostError(f"worker {worker.worker_id} aborted the request: {output.stop_reason or 'no reason'}")
        if output.finish_reason is FinishReason.ERROR:
            raise TandemError(f"worker {worker.worker_id} failed on the request: {output.stop_reason}")
        index = self._choice.index
        await self._queue.put(output if output.index == index else replace(output, index=index))
        # NOTE: noted only once the client will get them: when the line above is interrupted, both never happened.
        if output.token_ids:
            self._note_tokens(output.token_ids, now_s)
        if output.finished:
            self._final, self._stages, self._ended_s = output, update.timeline, now_s
        elif update.timeline:
            self._record.add_early(self._choice.index, update.timeline)

    def _note_tokens(self, token_ids: tuple[int, ...], now_s: float) -> None:
        if self._first_s is None or self._last_s is None:
            self._first_s = now_s
            self._context.metrics.observe_first(now_s - self._started_s)
        else:
            self._context.metrics.observe_tokens(len(token_ids), now_s - self._last_s)
        self._last_s = now_s
        self._token_ids += token_ids

    def _lost_for_good(self, error: TandemError) -> TandemError:
        if not isinstance(error, WorkerLostError):
            return error
        words = f"{len(self._failed)} workers of model {shown(self._request.model)} were lost at this request"
        return UnavailableError(f"{words}; try again in a moment", error.retry_after_s)

    def _give_up_on(self, worker: WorkerAddress, error: TandemError) -> None:
        """Records the failure.

        Raises:
            TandemError: it was the last attempt; without the address, which only the log has.
        """
        self._failed.append((worker, error))
        _logger.warning(
            "%s: worker %s failed after %d tokens: %s",
            self._choice.request_id,
            worker.worker_id,
            len(self._token_ids),
            error,
        )
        with self._record.timed("failover") as attributes:
            attributes.update(worker=worker.worker_id, num_tokens=len(self._token_ids), error=str(error)[:200])
        if len(self._failed) >= self._context.max_attempts:
            raise self._lost_for_good(error) from error
        self._context.metrics.failovers.inc()


def _ids(failed: Iterable[tuple[WorkerAddress, TandemError]]) -> tuple[str, ...]:
    return tuple({worker.worker_id for worker, _ in failed})


def _described(answer: PairingAnswer) -> dict[str, str | int | float]:
    """A pairing as attributes of its stage."""
    described: dict[str, str | int | float] = {
        "decode": answer.decode.worker_id,
        "prefill": answer.decode.worker_id if answer.prefill is None else answer.prefill.worker_id,
        "policy": answer.policy,
        "prefill_cached_blocks": answer.prefill_cached_blocks,
        "decode_cached_blocks": answer.decode_cached_blocks,
        "decision_ms": round(answer.decision_s * 1000, 3),
    }
    if answer.fetch_from is not None:
        described |= {"fetch_from": answer.fetch_from.worker_id, "num_fetch_blocks": answer.num_fetch_blocks}
    return described | {f"predicted_{name}_ms": round(value, 3) for name, value in answer.predicted_ms.items()}
