"""Small fleets and requests for routing tests."""

from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

from tandem.routing.admission import AdmissionLimits
from tandem.routing.candidates import Candidates, WorkerSnapshot
from tandem.routing.fleet import Fleet, snapshot_of
from tandem.routing.pairing import Pairer
from tandem.routing.policies import PredictedCost, RoutingPolicy
from tandem.routing.snapshot import Links, LinkState, RequestShape, Role, WorkerState
from tandem.routing.speed import DecodeSpeed, PrefillSpeed, PrefillWork, Speed

BLOCK_SIZE = 16
FAST = Speed(PrefillSpeed(2.0, 0.05, 1e-6), DecodeSpeed(5.0, 0.05, 5e-5))
SLOW = Speed(PrefillSpeed(5.0, 0.2, 4e-6), DecodeSpeed(20.0, 0.2, 2e-4))
SPEEDS = {"fast": FAST, "slow": SLOW}
LINK = LinkState(10e9, 0.5)


def worker(worker_id: str, role: Role = Role.PREFILL, **changes: Any) -> WorkerState:
    fields: dict[str, Any] = {
        "kind": "fast",
        "fingerprint": "model",
        "block_size": BLOCK_SIZE,
        "block_bytes": 1_000_000,
        "chunk_tokens": 512,
        "num_total_blocks": 10_000,
        "num_free_blocks": 10_000,
    }
    return WorkerState(worker_id=worker_id, role=role, **{**fields, **changes})


def queue_of(num_tokens: int) -> PrefillWork:
    return PrefillWork.of(num_tokens, 0) if num_tokens else PrefillWork()


def request(num_tokens: int = 2000, leading: Mapping[str, int] | None = None, **changes: Any) -> RequestShape:
    fields: dict[str, Any] = {"request_id": "r", "num_expected_output": 100, "fingerprints": frozenset({"model"})}
    return RequestShape(num_tokens=num_tokens, leading_blocks=leading or {}, **{**fields, **changes})


def pairer_of(
    *workers: WorkerState,
    policy: RoutingPolicy | None = None,
    links: Links | None = None,
    limits: AdmissionLimits | None = None,
    seed: int = 0,
) -> Pairer:
    fleet = Fleet(limits or AdmissionLimits(), links or Links(LINK), SPEEDS.__getitem__, seed)
    for state in workers:
        fleet.report(state)
    return Pairer(fleet, PredictedCost() if policy is None else policy)


def candidates_of(*workers: WorkerState, links: Links | None = None, **changes: Any) -> Candidates:
    snapshots = [snapshot_of(state, SPEEDS[state.kind], turn=turn) for turn, state in enumerate(workers)]
    return Candidates(
        prefill=[s for s in snapshots if s.worker.role is not Role.DECODE],
        decode=[s for s in snapshots if s.worker.role is not Role.PREFILL],
        holders={s.worker_id: s for s in snapshots},
        links=links or Links(LINK),
        **{"now_s": 0.0, **changes},
    )


def snapshot(state: WorkerState) -> WorkerSnapshot:
    return snapshot_of(state, SPEEDS[state.kind])


@st.composite
def workers(draw: st.DrawFn, max_workers: int = 6) -> list[WorkerState]:
    """Up to `max_workers` of any role, load and kind, all of one fingerprint."""
    num_workers = draw(st.integers(1, max_workers))
    request_bytes = draw(st.sampled_from([0, 0, 100_000_000]))
    return [
        worker(
            f"w{i}",
            draw(st.sampled_from(Role)),
            kind=draw(st.sampled_from(sorted(SPEEDS))),
            request_bytes=request_bytes,
            chunk_tokens=draw(st.sampled_from([128, 512, 2048])),
            queued=queue_of(draw(st.sampled_from([0, 0, 500, 5000, 20_000]))),
            num_running=draw(st.integers(0, 40)),
            num_context_tokens=draw(st.integers(0, 100_000)),
            reported_at_s=draw(st.sampled_from([0.0, -0.5, -1.0])),
        )
        for i in range(num_workers)
    ]


@st.composite
def links_between(draw: st.DrawFn, states: list[WorkerState]) -> Links:
    link = st.builds(LinkState, st.sampled_from([1e8, 1e9, 1e10, 1e11]), st.sampled_from([0.0, 0.1, 2.0]))
    ids = [state.worker_id for state in states]
    measured = draw(st.dictionaries(st.tuples(st.sampled_from(ids), st.sampled_from(ids)), link, max_size=12))
    links = Links(draw(link), measured)
    links.cut(draw(st.sets(st.sampled_from(ids))), draw(st.sampled_from(ids)))
    return links


@st.composite
def requests(draw: st.DrawFn, states: list[WorkerState]) -> RequestShape:
    ids = st.sampled_from([state.worker_id for state in states])
    return request(
        draw(st.sampled_from([1, 16, 17, 100, 2000, 12_000])),
        draw(st.dictionaries(ids, st.integers(0, 800), max_size=len(states))),
        num_expected_output=draw(st.sampled_from([1, 100, 1000])),
        max_tpot_ms=draw(st.sampled_from([None, 10.0, 30.0])),
    )
