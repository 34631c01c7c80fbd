"""A worker's status for routers: latest figures of its engine, and samples of the time that prompts and decodes took.

Making a status never waits for the engine: its figures are those of the last `refresh`, which the worker repeats at
short intervals. The status tells how old they are.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from tandem.core.draft_counts import DraftCounts
from tandem.core.machine import process_id
from tandem.core.process_usage import UsageMeter
from tandem.engine.engine import Engine
from tandem.engine.load import EngineLoad, StepStats
from tandem.kvcache.promised_blocks import PromisedUsage
from tandem.kvcache.usage import HeldState
from tandem.routing.snapshot import WorkerState
from tandem.routing.speed import PrefillWork
from tandem.rpc.messages import LinkReport, ModelInfo, PrefillSample, StepSample, WorkerStatus
from tandem.worker.core import WorkerCore
from tandem.worker.lifecycle import Lifecycle, LifecycleState

MAX_SAMPLES = 64  # steps kept for a subscriber between two of its reports; older ones are dropped
BLOCK_STATES = ("free", "cached", "used", "leased", "transferring", "pinned")  # reported fields of `KVCacheUsage`


@dataclass(eq=False, slots=True)
class ReportSubscriber:
    """A subscriber to the status, such as a router's stream; has the steps measured since its last report."""

    report: Callable[["ReportSubscriber"], WorkerStatus]
    samples: deque[StepStats] = field(default_factory=lambda: deque(maxlen=MAX_SAMPLES))

    def latest(self) -> WorkerStatus:
        """The current status for this subscriber; each sample is reported once."""
        return self.report(self)


class Reports:
    """Makes `WorkerStatus` messages and remembers the engine's figures for them.

    Args:
        blank: the state of this worker without any figures.
        model: the served model.
        links: measured connections to peers.
        unreachable: ids of peers that cannot be read from now.

    Of the last refresh: `promised`, usage of pinned prefixes; `drafts` and `read_bytes`, totals since the engine began.
    """

    def __init__(
        self,
        core: WorkerCore,
        lifecycle: Lifecycle,
        blank: WorkerState,
        model: ModelInfo,
        links: Callable[[], tuple[LinkReport, ...]],
        unreachable: Callable[[], tuple[str, ...]],
    ) -> None:
        self.model = model
        self._core = core
        self._lifecycle = lifecycle
        self._blank = blank
        self._links = links
        self._unreachable = unreachable
        self._meter = UsageMeter(core.clock)
        self._load: EngineLoad | None = None
        self._asked_at_s, self._taken_at_s = 0.0, 0.0
        self.promised = PromisedUsage()
        self.drafts = DraftCounts()
        self.read_bytes = 0.0
        self._receivers: set[ReportSubscriber] = set()

    @property
    def held(self) -> HeldState:
        """Bytes of KV and other state that requests held at the last refresh; 0 before the first."""
        return HeldState() if self._load is None else self._load.held

    async def refresh(self) -> None:
        """Reads the engine's figures; waits until it is between two steps. They include all requests given to it
        earlier.

        Raises:
            EngineStoppedError: the engine has stopped.
        """
        asked_at_s = self._core.clock.now_s()  # NOTE: what comes meanwhile is queued behind this
        self._load, self.promised, self.drafts, self.read_bytes, steps = await self._core.engine.call(_figures)
        self._asked_at_s, self._taken_at_s = asked_at_s, self._core.clock.now_s()
        for receiver in self._receivers:
            receiver.samples.extend(steps)

    def subscribe(self) -> ReportSubscriber:
        """Adds a subscriber, which gets the steps measured from now on, until `unsubscribe`."""
        receiver = ReportSubscriber(self._status)
        self._receivers.add(receiver)
        return receiver

    def unsubscribe(self, receiver: ReportSubscriber) -> None:
        self._receivers.discard(receiver)

    def latest(self) -> WorkerStatus:
        """The current status without samples; without figures before the first refresh."""
        return self._status(None)

    def _status(self, receiver: ReportSubscriber | None) -> WorkerStatus:
        load = self._load
        status = WorkerStatus(
            worker=self._core.me,
            pid=process_id(),
            epoch=self._core.epoch,
            lifecycle=str(self._lifecycle.state),
            state=replace(self._blank, draining=self._lifecycle.state is not LifecycleState.READY),
            model=self.model,
            links=self._links(),
            unreachable=self._unreachable(),
            usage=self._meter.read(),
            ranks=self._core.ranks(),
        )
        if load is None:
            return status
        now_s = self._core.clock.now_s()
        status = replace(
            status,
            state=_with_load(status.state, load, now_s - self._asked_at_s, now_s - self._taken_at_s),
            blocks={name: getattr(load.usage, name) for name in BLOCK_STATES},
            num_waiting=load.num_waiting,
            drafts=self.drafts,
        )
        return status if receiver is None else _with_samples(status, receiver.samples)


def _figures(engine: Engine) -> tuple[EngineLoad, PromisedUsage, DraftCounts, float, list[StepStats]]:
    counters, promised = engine.counters, engine.kv.pinned.blocks.usage
    return engine.load(), promised, counters.drafts, counters.read_bytes, engine.take_step_stats()


def _with_load(state: WorkerState, load: EngineLoad, asked_age_s: float, taken_age_s: float) -> WorkerState:
    """Adds the load. NOTE: pinned blocks yield to a request that has the worker for itself, so it must not be refused
    because of them.
    """
    num_yielding = load.usage.pinned if load.num_requests == 0 else 0
    num_free_pages = load.num_unpromised_blocks + num_yielding
    return replace(
        state,
        num_free_blocks=num_free_pages * state.num_total_blocks // load.usage.total,
        num_running=load.num_requests,
        num_awaiting_kv=load.num_awaiting_kv,
        num_context_tokens=load.num_context_tokens,
        queued=PrefillWork(load.num_prompts, load.num_prompt_tokens, load.num_prompt_pairs),
        figures_age_s=max(0.0, asked_age_s),
        taken_age_s=max(0.0, taken_age_s),
    )


def _with_samples(status: WorkerStatus, steps: deque[StepStats]) -> WorkerStatus:
    """Adds samples of steps that only computed prompts or only decoded; mixed steps show neither cost."""
    prompts = [step for step in steps if step.num_prompt_tokens and not step.num_decodes]
    decodes = [step for step in steps if step.num_decodes and not step.num_prompt_tokens]
    steps.clear()
    return replace(
        status,
        prefill_samples=tuple(
            PrefillSample(
                work=PrefillWork(step.num_prompts, step.num_prompt_tokens, step.num_prompt_pairs),
                duration_s=step.duration_s,
            )
            for step in prompts
        ),
        step_samples=tuple(
            StepSample(
                num_running=step.num_decodes, num_context_tokens=step.num_context_tokens, duration_s=step.token_s
            )
            for step in decodes
        ),
    )
