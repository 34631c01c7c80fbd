"""Read-only routes for operators: every process of the cluster, routing decisions, and the timelines of requests.

Worker figures come from the routers, to which each worker reports four times a second; unreachable routers are listed
as such.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from tandem.core.process_usage import ProcessUsage
from tandem.gateway.accounts import Caller
from tandem.gateway.errors import RequestError
from tandem.gateway.gateway import Gateway
from tandem.gateway.history import DEFAULT_SIZE, PROCESS
from tandem.gateway.routers import RouterListing
from tandem.rpc.messages import Decision, WorkerListing
from tandem.rpc.rank_messages import RankReport

T = TypeVar("T")


async def list_processes(gateway: Gateway, address: str) -> dict[str, Any]:
    """The body of `GET /admin/workers`. `address`: under which the client reached this gateway."""
    listings = await gateway.listings()
    own = {
        "role": PROCESS,
        "worker_id": PROCESS,
        "pid": os.getpid(),
        "address": address,
        "incarnation": gateway.incarnation,
        "state": "draining" if gateway.admission.is_closed else "ready",
        "is_alive": True,
        "age_s": 0.0,
        "num_running": gateway.admission.num_open,
        **_usage(gateway.usage.read()),
    }
    return {"workers": [own, *map(_router, listings), *map(_worker, _latest(listings))]}


async def list_decisions(gateway: Gateway, num_latest: int) -> dict[str, Any]:
    """The body of `GET /admin/decisions`: chosen workers, with predicted and measured times."""
    return {"decisions": [_decision(*item) for item in await gateway.routers.decisions(num_latest)]}


def find_request(gateway: Gateway, request_id: str, caller: Caller) -> dict[str, Any]:
    """The body of `GET /admin/requests/{request_id}`; the id of an answer is accepted too.

    Raises:
        RequestError: the id is unknown, belongs to another tenant, or was evicted from the history.
    """
    for prefix in ("", "chatcmpl-", "cmpl-", "msg_"):
        record = gateway.history.find(request_id.removeprefix(prefix))
        if record is not None and (caller.is_operator or record.tenant == caller.tenant):
            return record.as_json(is_operator=caller.is_operator)
    raise RequestError(
        f"request {request_id[:128]!r} is unknown here; this gateway keeps its last {DEFAULT_SIZE}",
        status=404,
        code="not_found",
    )


def _decision(router: str, decision: Decision) -> dict[str, Any]:
    predicted, measured = decision.predicted_ms.get("ttft"), decision.measured_ms.get("ttft")
    error = None if predicted is None or measured is None else round(measured - predicted, 3)
    return {"router": router, **asdict(decision), "ttft_error_ms": error}


def _router(listing: RouterListing) -> dict[str, Any]:
    process = listing.process
    return {
        "role": "router",
        "worker_id": f"router@{listing.address}",
        "pid": None if process is None else process.pid,
        "address": listing.address,
        "incarnation": None if process is None else process.incarnation,
        "state": "away" if process is None else process.lifecycle,
        "is_alive": listing.problem is None,
        "problem": listing.problem,
        "num_workers": len(listing.workers),
        **_usage(None if process is None else process.usage),
    }


def _usage(usage: ProcessUsage | None) -> dict[str, Any]:
    """CPU and memory of a process; None if it is unreachable or of an older release that does not report them."""
    if usage is None:
        return {"cpu_cores": None, "memory_bytes": None}
    cpu_cores = None if usage.cpu_cores is None else round(usage.cpu_cores, 3)
    return {"cpu_cores": cpu_cores, "memory_bytes": usage.memory_bytes}


def _latest(listings: Sequence[RouterListing]) -> Iterator[WorkerListing]:
    """Each worker once, as seen by the router that heard from it last."""
    found: dict[str, WorkerListing] = {}
    for worker in (worker for listing in listings for worker in listing.workers):
        worker_id = worker.status.worker.worker_id
        if worker_id not in found or worker.age_s < found[worker_id].age_s:
            found[worker_id] = worker
    return (found[worker_id] for worker_id in sorted(found))


def _ranks(report: RankReport) -> dict[str, Any]:
    """Totals, and `members`: each rank with its process and what it has of the model and of prompts."""
    found = asdict(report)
    for name in ("hosts", "silent_s"):
        del found[name]
    sections = max(len(set(report.stages)), 1) * max(len(set(report.contexts)), 1)
    width = max(1, len(report.pids) // sections)
    found["members"] = [
        {
            "rank": rank,
            "pid": pid,
            "host": _at(report.hosts, rank) or None,
            "silent_s": None if (silent_s := _at(report.silent_s, rank)) is None else round(silent_s, 3),
            "part": rank % width,
            "num_parts": width,
            "stage": _at(report.stages, rank),
            "context": _at(report.contexts, rank),
        }
        for rank, pid in enumerate(report.pids)
    ]
    if report.experts is not None and report.experts.imbalance is not None:
        found["experts"]["imbalance"] = round(report.experts.imbalance, 3)
    return found


def _at(values: Sequence[T], rank: int) -> T | None:
    """The entry of this rank, or None: workers of other releases may report fewer entries."""
    return values[rank] if rank < len(values) else None


def _worker(listing: WorkerListing) -> dict[str, Any]:
    status, state = listing.status, listing.status.state
    return {
        "role": state.role.value,
        "worker_id": status.worker.worker_id,
        "pid": status.pid,
        "address": status.worker.address,
        "incarnation": status.worker.incarnation,
        "epoch": status.epoch,
        "state": status.lifecycle,
        "is_alive": listing.is_alive,
        "age_s": round(listing.age_s, 3),
        "slowness": None if listing.slowness is None else round(listing.slowness, 2),
        "model": status.model.name,
        "blocks": dict(status.blocks),
        "block_size": state.block_size,
        "num_running": state.num_running,
        "num_waiting": status.num_waiting,
        "num_context_tokens": state.num_context_tokens,
        "queued_tokens": state.queued.num_tokens,
        "links": [asdict(link) for link in status.links],
        "unreachable": list(status.unreachable),
        "drafts": None if status.drafts is None else asdict(status.drafts),
        "ranks": None if status.ranks is None else _ranks(status.ranks),
        **_usage(status.usage),
    }
