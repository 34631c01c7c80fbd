"""One-line status of a running cluster, from its supervisor and its gateway's metrics and worker list.

`tandem up` prints it. A gateway that does not answer is reported in the line, not raised.
"""

import asyncio
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from tandem.core.errors import UnavailableError
from tandem.process.heard import is_heard
from tandem.process.probe import get
from tandem.process.supervised import ProcessState
from tandem.process.supervisor import Supervisor

_TIMEOUT_S = 2.0
_PROMPT, _OUTPUT = "vllm:prompt_tokens_total", "vllm:generation_tokens_total"
_ROLES = ("prefill", "decode", "both")


class ClusterStatus:
    """Reads the status of the gateway at `url`; rates are since the last call. `admin_key`: needed with accounts."""

    def __init__(self, url: str, supervisor: Supervisor, admin_key: str | None = None) -> None:
        self._url = url
        self._supervisor = supervisor
        self._admin_key = admin_key
        self._counts: Mapping[str, float] = {}
        self._asked_s = 0.0
        self._last_line = ""

    async def changed_line(self) -> str | None:
        """Returns the line, or None if it equals the last one."""
        line = " · ".join([self._health(), *await self._figures()])
        if line == self._last_line:
            return None
        self._last_line = line
        return line

    def _health(self) -> str:
        processes = self._supervisor.processes
        ill = [process.spec.name for process in processes if process.state is not ProcessState.READY]
        summary = f"{len(processes) - len(ill)} of {len(processes)} processes ready"
        return f"{summary} (not {', '.join(ill)})" if ill else summary

    async def _figures(self) -> list[str]:
        try:
            counts = _totals((await get(f"{self._url}/metrics", _TIMEOUT_S)).body)
            answer = await get(f"{self._url}/admin/workers", _TIMEOUT_S, self._admin_key)
            workers = None if answer.status in (401, 403) else _workers(answer.body)
        except (UnavailableError, ValueError) as error:
            return [f"the gateway does not answer: {error}"]
        running = f"{counts.get('vllm:num_requests_running', 0.0):.0f} running"
        if workers is None:
            return [running, *self._rates(counts), "the workers are shown to an admin's key only: --admin-key"]
        waiting = sum(_number(worker, "num_waiting") for worker in workers)
        return [f"{running}, {waiting:.0f} waiting", *self._rates(counts), *_usage(workers), *_aside(workers)]

    def _rates(self, counts: Mapping[str, float]) -> list[str]:
        now_s = asyncio.get_running_loop().time()
        elapsed_s, former = now_s - self._asked_s, self._counts
        self._asked_s, self._counts = now_s, counts
        if not former:
            return []
        rates = {
            name: max(0.0, counts.get(name, 0.0) - former.get(name, 0.0)) / elapsed_s for name in (_PROMPT, _OUTPUT)
        }
        return [f"{rates[_PROMPT]:.0f} prompt and {rates[_OUTPUT]:.0f} output tokens/s"]


def _totals(metrics: bytes) -> dict[str, float]:
    """Each metric summed over its labels."""
    totals: dict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(metrics.decode(errors="replace")):
        for sample in family.samples:
            totals[sample.name] += sample.value
    return totals


def _workers(body: bytes) -> list[dict[str, Any]]:
    """The workers that report, as the gateway lists them."""
    found = json.loads(body)
    entries = found.get("workers") if isinstance(found, dict) else None
    if not isinstance(entries, list):
        raise ValueError("it does not list its workers")
    return [entry for entry in entries if isinstance(entry, dict) and entry.get("role") in _ROLES and is_heard(entry)]


def _usage(workers: Iterable[Mapping[str, Any]]) -> list[str]:
    """Share of the KV blocks in use, for each role."""
    used: dict[str, float] = defaultdict(float)
    total: dict[str, float] = defaultdict(float)
    for worker in workers:
        blocks = worker.get("blocks")
        if isinstance(blocks, dict):
            size = sum(_number(blocks, state) for state in blocks)
            total[worker["role"]] += size
            used[worker["role"]] += size - _number(blocks, "free") - _number(blocks, "cached")
    return [f"KV {role} {100 * used[role] / total[role]:.0f} %" for role in _ROLES if total[role]]


def _aside(workers: Iterable[Mapping[str, Any]]) -> list[str]:
    """The workers that routers avoid because they are slow."""
    slow = [f"{worker['worker_id']} ({worker['slowness']:.0f}x)" for worker in workers if _number(worker, "slowness")]
    return [f"set aside as slow: {', '.join(slow)}"] if slow else []


def _number(fields: Mapping[str, Any], name: str) -> float:
    value = fields.get(name, 0)
    return float(value) if isinstance(value, int | float) else 0.0
