"""Samples the worker pools during a test: workers and requests by role, from GET /admin/workers.

Invariant: never ends a test. If the gateway refuses, sampling stops with a reason; if it is unreachable, samples are
missing.
"""

import asyncio
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tandem.loadtest.endpoint import GatewayEndpoint
from tandem.loadtest.failure import ExchangeError

ROLES = ("prefill", "decode", "both")
_ANSWER_S = 5.0
_COUNTS = ("num_running", "num_waiting")


@dataclass(frozen=True, slots=True)
class PoolSample:
    """Workers of one role at one time. `kv_used`: share of KV blocks that are neither free nor cached; `num_steps`,
    `num_drafted`, `num_accepted`, `saved_s`: decode steps of requests, drafts, accepted drafts and the seconds that
    drafts saved, since those workers started.
    """

    at_s: float
    role: str
    num_alive: int
    num_ready: int
    num_running: int
    num_waiting: int
    kv_used: float
    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    saved_s: float = 0.0


@dataclass(frozen=True, slots=True)
class DraftUse:
    """Drafts of all workers during a test: decode steps of requests, drafts in them, those accepted, and the seconds
    that they saved by the workers' estimate, as in `DraftCounts`.
    """

    num_steps: int
    num_drafted: int
    num_accepted: int
    saved_s: float

    @property
    def acceptance(self) -> float:
        return self.num_accepted / self.num_drafted

    @property
    def tokens_per_step(self) -> float:
        return 1 + self.num_accepted / max(1, self.num_steps)


class PoolWatch:
    """Collects `samples` in the order of their times. `problem`: why some or all are missing."""

    def __init__(self, endpoint: GatewayEndpoint, interval_s: float) -> None:
        self.samples: list[PoolSample] = []
        self.problem: str | None = None
        self._endpoint = endpoint
        self._interval_s = interval_s

    async def watch(self) -> None:
        """Samples until cancelled, or until the server refuses."""
        while self._interval_s:
            try:
                answer = await self._endpoint.operators.get("/admin/workers", _ANSWER_S)
            except ExchangeError as error:
                self.problem = self.problem or f"GET /admin/workers: {error}"
            else:
                if answer.status in (401, 403, 404, 405):
                    self.problem = f"GET /admin/workers answers {answer.status}"
                    return
                self.samples += pool_samples(answer.content, self._endpoint.now_s())
            await asyncio.sleep(self._interval_s)


def pool_samples(body: bytes, at_s: float) -> list[PoolSample]:
    """One sample for each role that has workers; none when the answer has another format."""
    try:
        found = json.loads(body)
    except ValueError:
        return []
    entries = found.get("workers") if isinstance(found, dict) else None
    workers = [entry for entry in entries if isinstance(entry, dict)] if isinstance(entries, list) else []
    by_role = ((role, [worker for worker in workers if worker.get("role") == role]) for role in ROLES)
    return [_sample(role, own, at_s) for role, own in by_role if own]


def _sample(role: str, workers: Iterable[Mapping[str, Any]], at_s: float) -> PoolSample:
    alive = [worker for worker in workers if worker.get("is_alive")]
    blocks = [worker["blocks"] for worker in alive if isinstance(worker.get("blocks"), dict)]
    total = sum(_number(each, state) for each in blocks for state in each)
    free = sum(_number(each, "free") + _number(each, "cached") for each in blocks)
    running, waiting = (sum(int(_number(worker, name)) for worker in alive) for name in _COUNTS)
    num_ready = sum(worker.get("state") == "ready" for worker in alive)
    drafts = [worker["drafts"] for worker in alive if isinstance(worker.get("drafts"), dict)]
    return PoolSample(
        at_s,
        role,
        len(alive),
        num_ready,
        running,
        waiting,
        1 - free / total if total else 0.0,
        num_steps=sum(int(_number(each, "num_steps")) for each in drafts),
        num_drafted=sum(_total(each, "drafted_at") for each in drafts),
        num_accepted=sum(_total(each, "accepted_at") for each in drafts),
        saved_s=sum(_number(each, "saved_s") for each in drafts),
    )


def draft_use(samples: Iterable[PoolSample]) -> DraftUse | None:
    """Drafts between the first and last sample; None without any. Counts that fall, as workers left, add nothing."""
    last: dict[str, PoolSample] = {}
    num_steps = num_drafted = num_accepted = 0
    saved_s = 0.0
    for sample in samples:
        before = last.get(sample.role, sample)
        num_steps += max(0, sample.num_steps - before.num_steps)
        num_drafted += max(0, sample.num_drafted - before.num_drafted)
        num_accepted += max(0, sample.num_accepted - before.num_accepted)
        if sample.num_steps >= before.num_steps:
            saved_s += sample.saved_s - before.saved_s
        last[sample.role] = sample
    return DraftUse(num_steps, num_drafted, num_accepted, saved_s) if num_drafted else None


def _number(fields: Mapping[str, Any], name: str) -> float:
    value = fields.get(name, 0)
    return float(value) if isinstance(value, int | float) else 0.0


def _total(fields: Mapping[str, Any], name: str) -> int:
    counts = fields.get(name)
    return sum(count for count in counts if isinstance(count, int)) if isinstance(counts, list) else 0
