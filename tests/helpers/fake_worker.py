"""A decode worker behind a real gRPC server, answering by a script.

Every worker draws the same letters for a seed, so a choice that moves between workers has one right text.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from tandem.core.draft_counts import DraftCounts
from tandem.core.errors import InvalidRequestError, TandemError, UnavailableError
from tandem.core.output import RequestMetrics, RequestOutput
from tandem.core.pins import Pin
from tandem.core.process_usage import ProcessUsage
from tandem.core.randomness import uniform
from tandem.core.timeline import Stage
from tandem.core.types import FinishReason, TokenLogprobs
from tandem.engine.validation import check_handoff
from tandem.routing.snapshot import Role, WorkerState
from tandem.rpc.context import incoming_traceparent
from tandem.rpc.credentials import Credentials
from tandem.rpc.messages import (
    ConfirmAnswer,
    ConfirmCall,
    GenerateCall,
    GenerateUpdate,
    Greeting,
    LeaseCall,
    LeaseUpdate,
    ModelInfo,
    PrefillCall,
    PrefillUpdate,
    WorkerAddress,
    WorkerStatus,
)
from tandem.rpc.network import RpcServer
from tandem.rpc.rank_messages import RankReport
from tandem.rpc.server import serve_worker
from tandem.scheduler.request import Handoff
from tandem.text.tokenizer import Tokenizer
from tests.helpers.secret import serving_as
from tests.helpers.tokenizers import NUM_TOKENS

MODEL = "tiny"
MAX_MODEL_LEN = 4096
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def letter(seed: int, position: int) -> str:
    """Letter that every worker generates at this position."""
    return _LETTERS[int(uniform(seed, position) * len(_LETTERS))]


def text_of(seed: int, num_tokens: int) -> str:
    """A whole answer."""
    return "".join(letter(seed, position) for position in range(num_tokens))


@dataclass(eq=False)
class FakeWorker:
    """A decode worker. Its script:

    refuse: raised instead of serving.
    fail_at, failure: raised before the token of this position.
    hold_at: silent before the token of this position until `go` is set; `reached` tells that it is there.
    is_stalled: answers nothing at all, as a stopped process.
    status_s: time that its status takes.
    lifecycle: as its status has it.
    burst: tokens a message.
    num_cached_tokens, grants_pins: what it says of its cache.
    usage: what it says of its process.
    drafts: what it says of its drafts.
    ranks: what it says of its ranks.
    is_slow_to_leave: keeps the stream open after its last message until `go` is set.
    """

    worker_id: str
    tokenizer: Tokenizer
    incarnation: str = "first"
    refuse: TandemError | None = None
    fail_at: int | None = None
    failure: TandemError = field(default_factory=lambda: UnavailableError("draining"))
    hold_at: int | None = None
    is_stalled: bool = False
    status_s: float = 0.0
    lifecycle: str = "ready"
    burst: int = 1
    end_early_at: int | None = None
    is_slow_to_leave: bool = False
    num_cached_tokens: int = 3
    grants_pins: bool = True
    usage: ProcessUsage | None = None
    drafts: DraftCounts | None = None
    ranks: RankReport | None = None
    last_reason: FinishReason | None = None
    calls: list[GenerateCall] = field(default_factory=list)
    traces: list[str | None] = field(default_factory=list)
    num_open: int = 0
    cancelled_at_s: list[float] = field(default_factory=list)
    num_status: int = 0
    go: asyncio.Event = field(default_factory=asyncio.Event)
    reached: asyncio.Event = field(default_factory=asyncio.Event)
    server: RpcServer | None = None

    @property
    def address(self) -> WorkerAddress:
        assert self.server is not None
        return WorkerAddress(self.worker_id, self.server.address, self.incarnation)

    async def serve(self, bind: str = "127.0.0.1:0", credentials: Credentials | None = None) -> None:
        """Answer calls, as this incarnation unless `credentials` say otherwise."""
        self.server = await serve_worker(self, bind, credentials or serving_as(self.incarnation))

    async def start_again(self, incarnation: str, credentials: Credentials | None = None) -> None:
        """At the same address; its streams break."""
        assert self.server is not None
        await self.server.stop(0)
        self.incarnation = incarnation
        await self.serve(self.server.address, credentials)

    async def kill(self) -> None:
        """As far as callers can tell, kill -9."""
        assert self.server is not None
        await self.server.stop(0)

    async def status(self) -> WorkerStatus:
        self.num_status += 1
        if self.is_stalled:
            await asyncio.Event().wait()
        await asyncio.sleep(self.status_s)
        return status_of(self)

    async def watch(self, interval_s: float) -> AsyncIterator[WorkerStatus]:
        while True:
            yield await self.status()
            await asyncio.sleep(interval_s)

    async def drain(self) -> None: ...

    async def generate(self, call: GenerateCall) -> AsyncIterator[GenerateUpdate]:
        self.calls.append(call)
        self.traces.append(incoming_traceparent.get())
        self.num_open += 1
        try:
            async for update in self._script(call):
                yield update
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled_at_s.append(time.monotonic())
            raise
        finally:
            self.num_open -= 1

    async def _script(self, call: GenerateCall) -> AsyncIterator[GenerateUpdate]:
        if self.refuse is not None:
            raise self.refuse
        assert call.params.seed is not None
        check_handoff(Handoff(output_token_ids=call.output_token_ids), call.params, NUM_TOKENS)
        num_tokens = call.params.max_tokens or 8
        position = len(call.output_token_ids)
        arrival_s = time.monotonic()
        while position < num_tokens:
            if self.is_stalled or self.hold_at == position:
                self.reached.set()
                await self.go.wait()
            if self.fail_at == position:
                raise self.failure
            if self.end_early_at == position:
                return
            end = min(position + self.burst, num_tokens)
            yield GenerateUpdate(*self._news(call, position, end, num_tokens, arrival_s))
            position = end
        if self.is_slow_to_leave:
            await self.go.wait()

    def _news(
        self, call: GenerateCall, start: int, end: int, num_tokens: int, arrival_s: float
    ) -> tuple[RequestOutput, tuple[Stage, ...]]:
        seed = call.params.seed or 0
        text = "".join(letter(seed, position) for position in range(start, end))
        token_ids = tuple(self.token_id(character) for character in text)
        is_first, is_last = start == len(call.output_token_ids), end == num_tokens
        reason = (self.last_reason or FinishReason.LENGTH) if is_last else None
        logprobs = None
        if call.params.logprobs is not None:
            logprobs = tuple(self._scored(token_id, call.params.logprobs) for token_id in token_ids)
        of_prompt: tuple[TokenLogprobs | None, ...] | None = None
        if call.params.prompt_logprobs is not None and is_first:
            top = call.params.prompt_logprobs
            of_prompt = (None, *(self._scored(token_id, top) for token_id in call.prompt_token_ids[1:]))
        metrics = RequestMetrics(
            arrival_s,
            arrival_s,
            arrival_s,
            time.monotonic(),
            len(call.prompt_token_ids),
            end,
            self.num_cached_tokens,
            0,
            tuple(Pin(pin.num_tokens // 16 * 16, pin.ttl_s) for pin in call.pins)
            if self.grants_pins
            else call.pins[:0],
        )
        output = RequestOutput(
            call.request_id,
            0,
            token_ids,
            text,
            logprobs,
            of_prompt,
            reason,
            "broken" if reason in (FinishReason.ERROR, FinishReason.ABORT) else None,
            metrics if is_first or is_last else None,
        )
        now_s = time.time()
        stages = (
            Stage("queue", self.worker_id, now_s - 0.004, 0.001),
            Stage("prefill", self.worker_id, now_s - 0.003, 0.002, {"num_tokens": len(call.prompt_token_ids)}),
            Stage("transfer", self.worker_id, now_s - 0.001, 0.001, {"num_bytes": 4096}),
        )
        return output, stages if is_first or is_last else ()

    def token_id(self, character: str) -> int:
        found = self.tokenizer.token_id(character)
        assert found is not None
        return found

    def _scored(self, token_id: int, num_top: int) -> TokenLogprobs:
        top = tuple((self.token_id(_LETTERS[rank]), -1.0 - rank) for rank in range(num_top))
        return TokenLogprobs(token_id, -0.5, 1, top)

    def prefill(self, call: PrefillCall) -> AsyncIterator[PrefillUpdate]:
        raise InvalidRequestError(f"{call.request_id}: this is a decode worker")

    async def greet(self, greeting: Greeting) -> Greeting:
        return greeting

    async def lease(self, call: LeaseCall) -> LeaseUpdate:
        return LeaseUpdate(lease_id=call.lease_id, num_tokens=0, groups=(), is_last=True, ttl_s=1.0)

    async def renew(self, lease_ids: Sequence[str]) -> Sequence[str]:
        return lease_ids

    async def confirm(self, call: ConfirmCall) -> ConfirmAnswer:
        return ConfirmAnswer(is_valid=False)

    async def release(self, lease_ids: Sequence[str]) -> None: ...


def model_info(num_decode: int = 1, sampling_defaults: dict[str, float] | None = None) -> ModelInfo:
    return ModelInfo(
        name=MODEL,
        fingerprint="f" * 32,
        max_model_len=MAX_MODEL_LEN,
        vocab_size=NUM_TOKENS,
        block_size=16,
        sampling_defaults=sampling_defaults or {},
        num_decode=num_decode,
    )


def status_of(worker: FakeWorker) -> WorkerStatus:
    state = WorkerState(
        worker_id=worker.worker_id,
        role=Role.DECODE,
        kind="fake",
        fingerprint="f" * 32,
        block_size=16,
        block_bytes=4096,
        chunk_tokens=512,
        num_total_blocks=100,
        num_free_blocks=90,
        num_running=worker.num_open,
    )
    return WorkerStatus(
        worker=worker.address,
        pid=4242,
        epoch=7,
        lifecycle=worker.lifecycle,
        state=state,
        model=model_info(),
        blocks={"free": 80, "cached": 10, "used": 10, "leased": 0, "transferring": 0},
        num_waiting=1,
        usage=worker.usage,
        drafts=worker.drafts,
        ranks=worker.ranks,
    )
