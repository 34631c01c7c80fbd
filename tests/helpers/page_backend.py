"""Made-up contents of the web pages: a worker that says given words, a router that tells of given workers."""

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tandem.core.draft_counts import DraftCounts
from tandem.core.output import RequestMetrics, RequestOutput
from tandem.core.timeline import Stage
from tandem.core.types import FinishReason
from tandem.gateway.server import serving_gateway
from tandem.gateway.settings import GatewaySettings
from tandem.routing.snapshot import Role
from tandem.rpc.messages import GenerateCall, GenerateUpdate, LinkReport, WorkerListing
from tandem.rpc.server import serve_router
from tandem.text.tokenizer import Tokenizer
from tandem.worker.stopwatch import draft_attributes
from tests.helpers.fake_backend import FakeCluster, FakeRouter, RouterFace
from tests.helpers.fake_worker import MODEL, FakeWorker, status_of
from tests.helpers.secret import AS_ROUTER, SECRET
from tests.helpers.tokenizers import write_byte_tokenizer


@dataclass(eq=False)
class SayingWorker(FakeWorker):
    """Says `answers`, one a request and each in its pieces; `hold_at` and `go` as of `FakeWorker`."""

    answers: list[Sequence[str]] = field(default_factory=list)

    async def _script(self, call: GenerateCall) -> AsyncIterator[GenerateUpdate]:
        pieces, arrival_s, num_tokens = self.answers.pop(0), time.monotonic(), 0
        for position, text in enumerate(pieces):
            if self.hold_at == position:
                self.reached.set()
                await self.go.wait()
            if self.fail_at == position:
                raise self.failure
            token_ids = tuple(self.tokenizer.encode(text, add_special_tokens=False))
            num_tokens += len(token_ids)
            is_last = position == len(pieces) - 1
            metrics = RequestMetrics(
                arrival_s, arrival_s, arrival_s, time.monotonic(), len(call.prompt_token_ids), num_tokens, 3, 0
            )
            reason = FinishReason.STOP if is_last else None
            output = RequestOutput(
                call.request_id, 0, token_ids, text, finish_reason=reason, metrics=metrics if is_last else None
            )
            yield GenerateUpdate(output, self._timeline(time.time()) if is_last else ())

    def _timeline(self, now_s: float) -> tuple[Stage, ...]:
        """Of a prompt that another worker computed."""
        drafts = DraftCounts(6, drafted_at=(6, 6), accepted_at=(5, 4), saved_s=0.021)
        return (
            Stage("queue", "prefill-0", now_s - 0.020, 0.002),
            Stage("prefill chunk", "prefill-0", now_s - 0.018, 0.010, {"num_tokens": 30}),
            Stage("first token", "prefill-0", now_s - 0.008, 0.0),
            Stage("transfer", self.worker_id, now_s - 0.008, 0.003, {"source": "prefill-0", "num_bytes": 34_600_000}),
            Stage("decode", self.worker_id, now_s - 0.005, 0.005, draft_attributes(drafts)),
        )


@dataclass(eq=False)
class TellingRouter(FakeRouter):
    """Tells of `told` as well as of its workers."""

    told: list[WorkerListing] = field(default_factory=list)

    async def listings(self) -> Sequence[WorkerListing]:
        return [*await super().listings(), *self.told]


@dataclass(frozen=True, slots=True)
class PageCluster:
    """A gateway over one worker and one router. `url`: of the gateway."""

    worker: SayingWorker
    router: TellingRouter
    fake: FakeCluster

    @property
    def url(self) -> str:
        return self.fake.url


@contextlib.asynccontextmanager
async def page_cluster(
    directory: Path, chat_template: str | None = None, **settings: Any
) -> AsyncIterator[PageCluster]:
    """A running one, for the time of the block. `chat_template`: of another kind of model."""
    write_byte_tokenizer(directory)
    if chat_template is not None:
        (directory / "chat_template.jinja").write_text(chat_template)
    worker = SayingWorker("decode-0", Tokenizer.load(directory))
    router = TellingRouter([worker])
    await worker.serve()
    router.server = await serve_router(RouterFace(router), "127.0.0.1:0", AS_ROUTER)
    where = {"model": str(directory), "routers": router.server.address, "cluster_secret": SECRET.decode()}
    options = {"port": 0, "drain_timeout_s": 1.0, "served_model_name": MODEL, **settings}
    configured = GatewaySettings.model_validate(where | options)
    try:
        async with serving_gateway(configured) as (gateway, finished):
            fake = FakeCluster([router], [worker], directory, gateway, finished)
            yield PageCluster(worker, router, fake)
    finally:
        worker.go.set()
        await asyncio.gather(worker.kill(), router.server.stop(0))


def listing(
    worker: FakeWorker, worker_id: str, role: Role = Role.DECODE, num_links: int = 0, **changes: Any
) -> WorkerListing:
    """Another worker as a router may tell of it, drawn by its name."""
    drawn = random.Random(worker_id)
    status = status_of(worker)
    used, cached = drawn.randrange(30), drawn.randrange(40)
    return WorkerListing(
        status=replace(
            status,
            worker=replace(status.worker, worker_id=worker_id),
            state=replace(status.state, worker_id=worker_id, role=role, num_running=drawn.randrange(48)),
            blocks={"free": 100 - used - cached, "cached": cached, "used": used, "leased": 0, "transferring": 0},
            links=tuple(_link(number) for number in range(num_links)),
            **changes,
        ),
        age_s=0.1,
        is_alive=True,
    )


def _link(number: int) -> LinkReport:
    """A faster one for a higher number; every hundredth is slower than it should be."""
    return LinkReport(
        source_id=f"prefill-{number}",
        transport="tcp",
        path="tcp",
        bytes_per_s=(number + 1) * 1e6,
        latency_s=1e-3,
        is_slow=number % 100 == 50,
    )
