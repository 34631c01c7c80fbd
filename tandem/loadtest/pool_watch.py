"""Samples the worker pools during a test: workers and requests by role, from GET /admin/workers.

Invariant: never ends a test. If the gateway refuses, sampling stops with a reason; if it is unreachable, samples are
missing.
"""

import asyncio
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tandem.core.draft_counts import DraftCounts
from tandem.loadtest.endpoint import GatewayEndpoint
from tandem.loadtest.failure import ExchangeError
from tandem.process.heard import is_heard

ROLES = ("prefill", "decode", "both")
_ANSWER_S = 5.0
_COUNTS = ("num_running", "num_waiting")


@dataclass(frozen=True, slots=True)
class PoolSample:
    """The workers of one role that report at one time, in any state.

    Args:
        num_running: requests that have begun. num_waiting: the others that were accepted.
        kv_used: share of their KV blocks that are neither free nor cached (0 to 1).
        drafts: totals of all of them since each started.
    """

    at_s: float
    role: str
    num_alive: int
    num_ready: int
    num_running: int
    num_waiting: int
    kv_used: float
    drafts: DraftCounts = field(default_factory=DraftCounts)


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
    alive = [worker for worker in workers if is_heard(worker)]
    blocks = [worker["blocks"] for worker in alive if isinstance(worker.get("blocks"), dict)]
    total = sum(_number(each, state) for each in blocks for state in each)
    free = sum(_number(each, "free") + _number(each, "cached") for each in blocks)
    accepted, waiting = (sum(int(_number(worker, name)) for worker in alive) for name in _COUNTS)
    num_ready = sum(worker.get("state") == "ready" for worker in alive)
    drafts = [worker["drafts"] for worker in alive if isinstance(worker.get("drafts"), dict)]
    return PoolSample(
        at_s,
        role,
        len(alive),
        num_ready,
        max(0, accepted - waiting),
        waiting,
        1 - free / total if total else 0.0,
        sum(map(_draft_counts, drafts), DraftCounts()),
    )


def drafts_between(samples: Iterable[PoolSample]) -> DraftCounts | None:
    """Drafts of all workers between the first and last sample; None if nothing was drafted.

    Where counts fall, because workers left, nothing is added.
    """
    last: dict[str, PoolSample] = {}
    found = DraftCounts()
    for sample in samples:
        before = last.get(sample.role, sample)
        if sample.drafts.num_steps >= before.drafts.num_steps:
            found += sample.drafts.since(before.drafts)
        last[sample.role] = sample
    return found if found.num_drafted else None


def _number(fields: Mapping[str, Any], name: str) -> float:
    value = fields.get(name, 0)
    return float(value) if isinstance(value, int | float) else 0.0


def _draft_counts(fields: Mapping[str, Any]) -> DraftCounts:
    drafted_at, accepted_at = (_counts(fields, name) for name in ("drafted_at", "accepted_at"))
    return DraftCounts(int(_number(fields, "num_steps")), drafted_at, accepted_at, _number(fields, "saved_s"))


def _counts(fields: Mapping[str, Any], name: str) -> tuple[int, ...]:
    counts = fields.get(name)
    return tuple(count for count in counts if isinstance(count, int)) if isinstance(counts, list) else ()
