"""kill -9 and SIGSTOP of each rank of a worker, its leader among them, in every state of a request.

All workers have two ranks, which divide each layer, the layers, or the tokens of prompts. A lost rank is found within
two seconds, its group is formed anew, every stream ends token-exact, and nothing is held afterwards. A rank ends with
its leader.
"""

import time
from collections.abc import Iterator
from typing import Any

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
OTHER, LEADER = "other", "leader"
ROLES = {"tp": (PREFILL, DECODE), "pp": (PREFILL, DECODE), "cp": (PREFILL,)}  # with two ranks, by what divides them
QUICK = {  # of `tp` there is one in `test_ranks`
    ("pp", PREFILL, State.COMPUTING, OTHER, KILL),
    ("cp", PREFILL, State.COMPUTING, OTHER, KILL),
}
CASES = [
    (divided, role, state, which, signal)
    for divided, roles in ROLES.items()
    for role in roles
    for state in State
    for which in (OTHER, LEADER)
    for signal in (KILL, STOP)
]


def params(case: tuple[str, str, State, str, str]) -> Any:
    """Of a test; slow but for a few."""
    divided, role, state, which, signal = case
    name = f"{divided}-{role}-{state.name}-{which}-{signal}"
    return pytest.param(*case, marks=[] if case in QUICK else pytest.mark.slow, id=name)


@pytest.fixture(scope="module")
def ranks(
    request: pytest.FixtureRequest, pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Scene, Known, str]]:
    """Two workers of each role, and what they answer undisturbed."""
    load_or_skip()
    divided: str = request.param
    model = save_slow_model(tmp_path_factory.mktemp("models") / divided)
    flags = dict.fromkeys(ROLES[divided], (f"--{divided}", "2"))
    extra = {"worker": WORKER_FLAGS, "router": ROUTER_FLAGS, **flags}
    with running_cluster(model, prefill=2, decode=2, extra=extra) as cluster, logs_shown(pytestconfig, cluster):
        scene = Scene(cluster)
        scene.heal()
        asked = asked_of(1, 1000, 48, temperature=0.8)
        yield scene, Known(asked, scene.answer_to(asked)), divided


def ranks_of(scene: Scene, name: str) -> list[psutil.Process]:
    """Those that a worker leads."""
    return psutil.Process(scene.cluster.processes[name].pid).children()


def is_gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@pytest.mark.parametrize(("ranks", "role", "state", "which", "signal"), list(map(params, CASES)), indirect=["ranks"])
def test_a_lost_rank(
    ranks: tuple[Scene, Known, str], matrix: Matrix, role: str, state: State, which: str, signal: str
) -> None:
    scene, told, divided = ranks
    scene.heal()
    with staged(scene, state, told.asked) as target:
        victim = target.prefill if role == PREFILL else target.decode
        (rank,) = ranks_of(scene, victim)
        since_s = time.monotonic()
        if which == LEADER:
            strike(scene, victim, signal)
        else:
            rank.kill() if signal == KILL else rank.suspend()
            scene.cluster.wait(lambda: not rank.is_running(), PATIENCE_S)
            assert time.monotonic() - since_s < FOUND_S, "its leader has seen the end of it"
        outcome, silence_s = ended_exactly(scene, target, told, since_s)
        fresh_s = time_of_new_request(scene, SHORT, gateway=0)
    if which == OTHER:  # what the group held is free once there is a group again
        scene.cluster.wait(lambda: [each.pid for each in ranks_of(scene, victim)] not in ([], [rank.pid]), PATIENCE_S)
        scene.cluster.wait(lambda: all(row["state"] == "ready" for row in scene.cluster.workers()), PATIENCE_S)
    over_s = time.monotonic()
    survivors = [name for name in scene.workers() if which == OTHER or name != victim]
    free_s = scene.seconds_until_free(survivors, over_s, limit_of(role))
    leaked = sum(scene.held(name) for name in survivors)
    matrix.append(Row(f"{role} of {divided} 2, {which}", state, signal, outcome, silence_s, fresh_s, free_s, leaked))
    if which == LEADER:
        scene.continue_all()
        if signal == KILL:
            scene.cluster.wait(lambda: is_gone(rank), PATIENCE_S)
        else:
            scene.seconds_until_free([victim], time.monotonic(), LEASE_TTL_S + FREE_S + SLACK_S)
    scene.heal()
    scene.cluster.wait(lambda: all(row["state"] == "ready" for row in scene.cluster.workers()), PATIENCE_S)
    assert scene.answer_to(told.asked.salted(scene.new_salt())) == told.token_ids
