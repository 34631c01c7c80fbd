"""kill -9 and SIGSTOP of the rank of each stage of a worker, its leader's among them, in every state of a request.

All workers have two stages. A lost rank is found within two seconds, its group is formed anew, every stream ends
token-exact, and nothing is held afterwards. A rank ends with its leader.
"""

import time
from collections.abc import Iterator

import psutil
import pytest

from tests.faults.conftest import ROUTER_FLAGS, SHORT, logs_shown
from tests.faults.matrix import Matrix, Row
from tests.faults.scene import LEASE_TTL_S, WORKER_FLAGS, Scene, save_slow_model
from tests.faults.states import State, staged
from tests.faults.streams import PATIENCE_S, Known, asked_of
from tests.faults.test_matrix import (
    DECODE,
    FREE_S,
    KILL,
    PREFILL,
    SLACK_S,
    STOP,
    ended_exactly,
    limit_of,
    strike,
    time_of_new_request,
)
from tests.helpers.cluster import running_cluster
from tests.helpers.native_kernels import load_or_skip

FOUND_S = 2.5  # two seconds, and what a busy machine takes
FIRST, LEADER = "first stage", "last stage, the leader"
QUICK = {(PREFILL, State.COMPUTING, FIRST, KILL)}
CASES = [
    pytest.param(
        *case, marks=[] if case in QUICK else pytest.mark.slow, id=f"{case[0]}-{case[1].name}-{case[2]}-{case[3]}"
    )
    for case in (
        (role, state, stage, signal)
        for role in (PREFILL, DECODE)
        for state in State
        for stage in (FIRST, LEADER)
        for signal in (KILL, STOP)
    )
]


@pytest.fixture(scope="module")
def stages(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Scene, Known]]:
    """Two workers of each role, and what they answer undisturbed."""
    load_or_skip()
    model = save_slow_model(tmp_path_factory.mktemp("models") / "stages")
    extra = {"worker": (*WORKER_FLAGS, "--pp", "2"), "router": ROUTER_FLAGS}
    with running_cluster(model, prefill=2, decode=2, extra=extra) as cluster, logs_shown(pytestconfig, cluster):
        scene = Scene(cluster)
        scene.heal()
        asked = asked_of(1, 1000, 48, temperature=0.8)
        yield scene, Known(asked, scene.answer_to(asked))


def ranks_of(scene: Scene, name: str) -> list[psutil.Process]:
    """Those that a worker leads: that of its first stage, where it has any."""
    return psutil.Process(scene.cluster.processes[name].pid).children()


def is_gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(("role", "state", "stage", "signal"), CASES)
def test_a_lost_rank_of_a_stage(
    stages: tuple[Scene, Known], matrix: Matrix, role: str, state: State, stage: str, signal: str
) -> None:
    scene, told = stages
    scene.heal()
    with staged(scene, state, told.asked) as target:
        victim = target.prefill if role == PREFILL else target.decode
        (rank,) = ranks_of(scene, victim)
        since_s = time.monotonic()
        if stage == LEADER:
            strike(scene, victim, signal)
        else:
            rank.kill() if signal == KILL else rank.suspend()
            scene.cluster.wait(lambda: not rank.is_running(), PATIENCE_S)
            assert time.monotonic() - since_s < FOUND_S, "its leader has seen the end of it"
        outcome, silence_s = ended_exactly(scene, target, told, since_s)
        fresh_s = time_of_new_request(scene, SHORT, gateway=0)
    if stage == FIRST:  # what the group held is free once there is a group again
        scene.cluster.wait(lambda: [each.pid for each in ranks_of(scene, victim)] not in ([], [rank.pid]), PATIENCE_S)
        scene.cluster.wait(lambda: all(row["state"] == "ready" for row in scene.cluster.workers()), PATIENCE_S)
    over_s = time.monotonic()
    survivors = [name for name in scene.workers() if stage == FIRST or name != victim]
    free_s = scene.seconds_until_free(survivors, over_s, limit_of(role))
    leaked = sum(scene.held(name) for name in survivors)
    matrix.append(Row(f"{role}, {stage}", state, signal, outcome, silence_s, fresh_s, free_s, leaked))
    if stage == LEADER:
        scene.continue_all()
        if signal == KILL:
            scene.cluster.wait(lambda: is_gone(rank), PATIENCE_S)
        else:
            scene.seconds_until_free([victim], time.monotonic(), LEASE_TTL_S + FREE_S + SLACK_S)
    scene.heal()
    scene.cluster.wait(lambda: all(row["state"] == "ready" for row in scene.cluster.workers()), PATIENCE_S)
    assert scene.answer_to(told.asked.salted(scene.new_salt())) == told.token_ids
