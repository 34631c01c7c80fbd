"""Records of the latest requests and where their time went, for operators.

Invariant: bounded in requests and in stages (timed parts of a request); the oldest request is evicted first. Holds
figures and worker ids, never prompts or answers.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from tandem.core.clock import Clock, SystemClock
from tandem.core.machine import wall_s
from tandem.core.timeline import Stage
from tandem.gateway.request import ChoiceEnd

PROCESS = "gateway"  # name of the gateway's own stages
DEFAULT_SIZE = 1000
MAX_STAGES = 512  # of this process in a record, and of each choice's worker
MAX_PARTS = 50_000  # stages and ends of choices in all records; each takes half a kilobyte


@dataclass(slots=True)
class _Count:
    """Number of stages and ends that all records of one history hold."""

    num_parts: int = 0


@dataclass(slots=True)
class RequestRecord:
    """One request as the gateway and its workers measured it.

    Args:
        started_s: wall-clock time.
        kind: of the dialect, such as chat.
        state: running, or as given to `close`.
        error: the error that ended it, for operators.
        problem: the same as its client was told.
        ends: ends of its choices, by index.
        workers: ids of the decode workers that served it, in order.
    """

    request_id: str
    model: str
    started_s: float
    clock: Clock = field(default_factory=SystemClock)
    kind: str = ""
    tenant: str = ""
    answer_id: str | None = None
    state: str = "running"
    num_choices: int = 0
    duration_s: float | None = None
    error: str | None = None
    problem: str | None = None
    ends: dict[int, ChoiceEnd] = field(default_factory=dict)
    workers: list[str] = field(default_factory=list)
    _began_s: float = field(init=False)
    _own: list[Stage] = field(default_factory=list)
    _workers: dict[int, list[Stage]] = field(default_factory=dict)
    _count: _Count = field(default_factory=_Count)

    def __post_init__(self) -> None:
        self._began_s = self.clock.now_s()

    def add(self, stage: Stage) -> None:
        """Adds a stage of this process; dropped beyond `MAX_STAGES`."""
        if len(self._own) < MAX_STAGES:
            self._own.append(stage)
            self._count.num_parts += 1

    def close(self, state: str, error: str | None = None, problem: str | None = None) -> None:
        """Marks the request as ended; only the first call has an effect."""
        if self.state == "running":
            self.state, self.error, self.problem = state, error, problem
            self.duration_s = self.clock.now_s() - self._began_s

    def add_early(self, index: int, stages: Sequence[Stage]) -> None:
        """Adds stages that a worker reports before the choice has ended."""
        known = self._workers.setdefault(index, [])
        before = len(known)
        known.extend(stages[: MAX_STAGES - before])
        self._count.num_parts += len(known) - before

    def end_choice(self, end: ChoiceEnd) -> None:
        """Records the end of a choice; its complete timeline replaces the stages reported early."""
        before = self.num_parts
        self.ends[end.index] = end
        if end.stages:
            self._workers[end.index] = list(end.stages[:MAX_STAGES])
        self._count.num_parts += self.num_parts - before

    @property
    def num_parts(self) -> int:
        """Number of stages and ends in this record."""
        return len(self._own) + len(self.ends) + sum(map(len, self._workers.values()))

    def detach(self) -> None:
        """Stops counting this record's parts for the history, which has evicted it."""
        self._count.num_parts -= self.num_parts
        self._count = _Count()

    def stages(self) -> list[Stage]:
        """All known stages by start time; with several choices, workers' stages carry the choice's index."""
        found = list(self._own)
        for index, stages in self._workers.items():
            found += stages if self.num_choices < 2 else [_of_choice(stage, index) for stage in stages]
        return sorted(found, key=lambda stage: stage.start_s)

    @contextmanager
    def timed(self, name: str, unless: tuple[type[Exception], ...] = ()) -> Iterator[dict[str, str | int | float]]:
        """Records the block as a stage of the gateway; items put into the yielded dict become its attributes.

        Args:
            unless: errors after which no stage is recorded.
        """
        is_stage, start_s, began_s = True, wall_s(), self.clock.now_s()
        attributes: dict[str, str | int | float] = {}
        try:
            yield attributes
        except unless:
            is_stage = False
            raise
        finally:
            if is_stage:
                self.add(Stage(name, PROCESS, start_s, self.clock.now_s() - began_s, attributes))

    def as_json(self, *, is_operator: bool = True) -> dict[str, Any]:
        """The record. `is_operator`: with errors of processes, which may name addresses; else only with its client's
        own.
        """
        ends = [self.ends[index] for index in sorted(self.ends)]
        return {
            "request_id": self.request_id,
            "model": self.model,
            "kind": self.kind,
            "state": self.state,
            "error": self.error if is_operator else self.problem,
            "started_s": self.started_s,
            "duration_s": self.duration_s,
            "ttft_s": min((end.ttft_s for end in ends if end.ttft_s is not None), default=None),
            "workers": self.workers,
            "num_choices": self.num_choices,
            "num_failovers": sum(end.num_failovers for end in ends),
            "prompt_tokens": sum(end.num_prompt_tokens for end in ends),
            "output_tokens": sum(end.num_output_tokens for end in ends),
            "cached_tokens": sum(end.metrics.num_cached_tokens for end in ends if end.metrics is not None),
            "choices": [_end_as_json(end, is_operator=is_operator) for end in ends],
            "stages": [_stage_as_json(stage, is_operator=is_operator) for stage in self.stages()],
        }


class RequestHistory:
    """The last `size` requests, found by request id or answer id. Owned by one event loop."""

    def __init__(self, size: int = DEFAULT_SIZE, clock: Clock | None = None) -> None:
        self._size = size
        self._clock = clock or SystemClock()
        self._count = _Count()
        self._records: OrderedDict[str, RequestRecord] = OrderedDict()
        self._by_answer: dict[str, RequestRecord] = {}

    def open(self, request_id: str, model: str, started_s: float) -> RequestRecord:
        """Adds a new record; an earlier record of the same id is evicted."""
        self._forget(request_id)
        record = RequestRecord(request_id, model, started_s, self._clock, _count=self._count)
        self._records[request_id] = record
        while len(self._records) > self._size or (self._count.num_parts > MAX_PARTS and len(self._records) > 1):
            self._forget(next(iter(self._records)))
        return record

    def name(self, record: RequestRecord, answer_id: str) -> None:
        """Makes the record findable by `answer_id` as long as it is kept."""
        if self._records.get(record.request_id) is record:
            record.answer_id = answer_id
            self._by_answer[answer_id] = record

    def find(self, request_id: str) -> RequestRecord | None:
        """The record of this request id or answer id, or None."""
        return self._records.get(request_id) or self._by_answer.get(request_id)

    def _forget(self, request_id: str) -> None:
        record = self._records.pop(request_id, None)
        if record is not None:
            record.detach()
        if record is not None and record.answer_id is not None:
            del self._by_answer[record.answer_id]


def _of_choice(stage: Stage, index: int) -> Stage:
    return Stage(stage.name, stage.process, stage.start_s, stage.duration_s, {**stage.attributes, "choice": index})


def _stage_as_json(stage: Stage, *, is_operator: bool) -> Mapping[str, Any]:
    shown = {name: value for name, value in stage.attributes.items() if is_operator or name != "error"}
    return {**asdict(stage), "attributes": shown}


def _end_as_json(end: ChoiceEnd, *, is_operator: bool) -> Mapping[str, Any]:
    metrics = end.metrics
    return {
        "index": end.index,
        "finish_reason": end.reason,
        "error": end.error if is_operator else None,
        "prompt_tokens": end.num_prompt_tokens,
        "output_tokens": end.num_output_tokens,
        "cached_tokens": 0 if metrics is None else metrics.num_cached_tokens,
        "num_preemptions": 0 if metrics is None else metrics.num_preemptions,
        "num_failovers": end.num_failovers,
        "ttft_s": end.ttft_s,
    }
