"""kill -9 and SIGSTOP of every kind of process in every state of a request, between real processes.

After each: every stream ends token-exact, a new request is served within `MAX_FRESH_S`, no survivor holds a block for
longer than a dead peer's leases last. Only the streams of a gateway that dies are lost, and their clients see the
connection end.
"""

import time
from collections.abc import Callable, Mapping

import pytest

from tests.faults.matrix import Matrix, Row
from tests.faults.scene import LEASE_TTL_S, MAX_FRESH_S, Scene
from tests.faults.states import Staged, State, staged
from tests.faults.streams import Asked, Known

MAX_SILENCE_S = 5.0
FREE_S = 1.0
SLACK_S = 0.75  # NOTE: a worker's figures are up to 0.2 s old, and it looks for ended leases every 0.25 s
UNREAD_S = 10.0  # in which a request ends whose gateway does not read its tokens
KILL, STOP = "kill -9", "SIGSTOP"
PREFILL, DECODE, ROUTER, GATEWAY, REDIS = "prefill", "decode", "router", "gateway", "redis"
QUICK = {
    *((PREFILL, state, KILL) for state in (State.COMPUTING, State.TRANSFER)),
    *((DECODE, state, KILL) for state in (State.QUEUED, State.TRANSFER, State.DECODING)),
    *((PREFILL, State.TRANSFER, STOP), (DECODE, State.DECODING, STOP)),
    *((ROUTER, State.COMPUTING, KILL), (REDIS, State.DECODING, STOP), (REDIS, State.DECODING, KILL)),
    *((GATEWAY, State.DECODING, signal) for signal in (KILL, STOP)),
}  # NOTE: a stopped process takes 12 s until it is given up and forgotten
NUM_STAGINGS = 3
CASES = [
    pytest.param(
        role,
        state,
        signal,
        marks=[] if (role, state, signal) in QUICK else pytest.mark.slow,
        id=f"{role}-{state.name}-{signal}",
    )
    for role in (PREFILL, DECODE, ROUTER, GATEWAY, REDIS)
    for state in State
    for signal in (KILL, STOP)
]


@pytest.mark.parametrize(("role", "state", "signal"), CASES)
def test_fault(
    scene: Scene, known: Mapping[float, Known], short: Asked, matrix: Matrix, role: str, state: State, signal: str
) -> None:
    """A transfer takes milliseconds: a signal that comes too late for it has shown nothing, and is given anew."""
    told = known[0.8 if signal == KILL else 0.0]
    for _ in range(NUM_STAGINGS):
        row = fault(scene, told, short, role, state, signal)
        if row is not None:
            matrix.append(row)
            return
        scene.heal()
    raise AssertionError(f"the transfer was over before the signal, {NUM_STAGINGS} times")


def fault(scene: Scene, told: Known, short: Asked, role: str, state: State, signal: str) -> Row | None:
    """Outcome of one fault; None = the state was over before the signal."""
    paired_before = num_paired(scene)
    failed_before = {name: scene.transfer_failures(name) for name in scene.cluster.names(DECODE)}
    with staged(scene, state, told.asked) as target:
        victim = VICTIMS[role](scene, target, paired_before)
        since_s, wall_s, is_in_time = time.monotonic(), time.time(), True
        strike(scene, victim, signal)
        if role == GATEWAY:
            outcome, silence_s = ended_with_its_gateway(scene, target, signal, told, short, since_s)
        else:
            outcome, silence_s = ended_exactly(scene, target, told, since_s)
        fresh_s = time_of_new_request(scene, short, gateway=int(role == GATEWAY))
        if state is State.TRANSFER and victim != target.decode and not (role == GATEWAY and signal == KILL):
            is_in_time = was_cut(scene, target, wall_s, failed_before[target.decode])
    over_s = time.monotonic()
    survivors = [name for name in scene.workers() if name != victim]
    free_s = scene.seconds_until_free(survivors, over_s, limit_of(role))
    leaked = sum(scene.held(name) for name in survivors)
    scene.continue_all()
    if signal == STOP and victim in scene.workers():
        scene.seconds_until_free([victim], time.monotonic(), LEASE_TTL_S + FREE_S)
    return Row(role, state, signal, outcome, silence_s, fresh_s, free_s, leaked) if is_in_time else None


def limit_of(role: str) -> float:
    """Seconds for which blocks may be held: a peer that died may have leases."""
    return (LEASE_TTL_S if role in (PREFILL, DECODE, GATEWAY) else FREE_S) + SLACK_S


def strike(scene: Scene, victim: str, signal: str) -> None:
    if victim == REDIS:
        assert scene.redis is not None
        scene.redis.kill() if signal == KILL else scene.pause_redis()
    elif signal == KILL:
        scene.cluster.processes[victim].kill()
    else:
        scene.cluster.processes[victim].stop()


def ended_exactly(scene: Scene, target: Staged, told: Known, since_s: float) -> tuple[str, float]:
    """Every stream goes on to its end as if nothing had happened; (how, its longest silence)."""
    for answer in target.answers():
        answer.wait()
        assert answer.error is None, answer.error
        assert answer.token_ids == told.token_ids
        assert answer.longest_silence_s(since_s) < MAX_SILENCE_S + waiting_s(target)
    record = scene.cluster.get(f"/admin/requests/{target.answer.request_id}")
    sources = {stage["process"] for stage in record["stages"] if stage["name"] == "prefill chunk"}
    how = [f"{record['num_failovers']} failover"] * bool(record["num_failovers"])
    how += ["prefilled elsewhere"] * bool(sources - {target.prefill})
    return ", ".join(["exact", *how]), target.answer.longest_silence_s(since_s)


def was_cut(scene: Scene, target: Staged, wall_s: float, num_failed: float) -> bool:
    """Whether a read of the target was under way at that time: it failed, or ended later."""
    record = scene.cluster.get(f"/admin/requests/{target.answer.request_id}")
    ends_s = [s["start_s"] + s["duration_s"] for s in record["stages"] if s["name"] == "transfer"]
    return max(ends_s, default=0.0) > wall_s or scene.transfer_failures(target.decode) > num_failed


def waiting_s(target: Staged) -> float:
    """Seconds for which a stream may be silent because others are served before it."""
    return 5.0 * len(target.others)


def ended_with_its_gateway(
    scene: Scene, target: Staged, signal: str, told: Known, short: Asked, since_s: float
) -> tuple[str, float]:
    """Killed: clients see the connection end. Stopped: they get the rest when it goes on, and the silence counts from
    then: before, it lasts as long as the workers take to finish what nobody reads.
    """
    if signal == STOP:
        scene.seconds_until_free(scene.workers(), time.monotonic(), UNREAD_S + waiting_s(target))
        time_of_new_request(scene, short, gateway=1)
        continued_s = time.monotonic()
        scene.cluster.processes["gateway-0"].cont()
        return ended_exactly(scene, target, told, continued_s)
    for answer in target.answers():
        answer.wait(timeout_s=MAX_SILENCE_S)
        assert answer.error is not None
        assert answer.error.startswith("connection lost")
        assert answer.token_ids == told.token_ids[: len(answer.token_ids)]
    return "connection lost", target.answer.longest_silence_s(since_s)


def time_of_new_request(scene: Scene, short: Asked, gateway: int) -> float:
    answer = scene.finished(short, gateway)
    assert answer.error is None, answer.error
    assert len(answer.token_ids) == short.max_tokens
    record = scene.cluster.get(f"/admin/requests/{answer.request_id}", gateway)
    assert answer.took_s < MAX_FRESH_S, f"a new request took {answer.took_s:.2f} s: {record}"
    return answer.took_s


def num_paired(scene: Scene) -> dict[str, float]:
    """Requests that each router has paired."""
    return {
        name: sum(scene.cluster.metrics(name).get("tandem_router_decisions_total", {}).values())
        for name in scene.cluster.names(ROUTER)
    }


def _router_of(scene: Scene, target: Staged, before: Mapping[str, float]) -> str:
    """The one that paired it."""
    after = num_paired(scene)
    (name,) = [name for name in after if after[name] > before[name]]
    return name


VICTIMS: dict[str, Callable[[Scene, Staged, Mapping[str, float]], str]] = {
    PREFILL: lambda _, target, __: target.prefill,
    DECODE: lambda _, target, __: target.decode,
    ROUTER: _router_of,
    GATEWAY: lambda *_: "gateway-0",
    REDIS: lambda *_: REDIS,
}
