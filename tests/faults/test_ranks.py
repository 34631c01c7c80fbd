"""Workers of two ranks in a real cluster: a lost rank costs no stream, and its worker serves again."""

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.faults.conftest import logs_shown
from tests.faults.scene import WORKER_FLAGS, Scene, save_slow_model
from tests.faults.streams import PATIENCE_S, asked_of
from tests.helpers.cluster import running_cluster
from tests.helpers.native_kernels import load_or_skip


@pytest.fixture
def ranks_scene(pytestconfig: pytest.Config, tmp_path: Path) -> Iterator[Scene]:
    """A worker of two ranks and one of a single rank, which both compute prompts themselves."""
    load_or_skip()
    extra = {"worker": WORKER_FLAGS, "decode-0": ("--tp", "2")}
    model = save_slow_model(tmp_path / "model", num_key_value_heads=2)
    with running_cluster(model, prefill=0, decode=2, extra=extra) as cluster, logs_shown(pytestconfig, cluster):
        yield Scene(cluster)


def has_new_ranks(scene: Scene, name: str, former: psutil.Process) -> bool:
    """Whether a worker's group was formed anew, and the worker takes requests."""
    (rank,) = psutil.Process(scene.cluster.processes[name].pid).children()
    states = {row["worker_id"]: row["state"] for row in scene.cluster.workers() if "worker_id" in row}
    return rank.pid != former.pid and states[name] == "ready"


def test_a_lost_rank_costs_no_stream_and_its_worker_serves_again(ranks_scene: Scene) -> None:
    """The stream goes on token-exact with another width; so does the next, on the group that was formed anew."""
    ranked, single = (ranks_scene.cluster.processes[name] for name in ("decode-0", "decode-1"))
    asked = asked_of(1, 200, 300, temperature=0.8)
    single.stop()
    with ranks_scene.ask(asked) as answer:
        answer.wait(5)
        assert ranks_scene.pairing(answer)["decode"] == "decode-0"
        single.cont()
        ranks_scene.cluster.wait(lambda: all(not row.get("unreachable") for row in ranks_scene.cluster.workers()))
        (rank,) = psutil.Process(ranked.pid).children()
        rank.kill()
        answer.wait()
        assert answer.error is None
        assert ranks_scene.pairing(answer)["decode"] == "decode-1"
    assert answer.token_ids == ranks_scene.answer_to(asked), "which one rank alone gives"
    ranks_scene.cluster.wait(lambda: has_new_ranks(ranks_scene, "decode-0", rank), PATIENCE_S)
    single.stop()
    with ranks_scene.ask(asked) as again:
        again.wait()
        assert ranks_scene.pairing(again)["decode"] == "decode-0"
    single.cont()
    assert again.token_ids == answer.token_ids
    assert ranked.is_running()


@pytest.fixture
def only_scene(pytestconfig: pytest.Config, tmp_path: Path) -> Iterator[Scene]:
    """A worker of two ranks alone, and a gateway that waits for it as long as a group may take on a busy machine."""
    load_or_skip()
    extra = {"worker": (*WORKER_FLAGS, "--tp", "2"), "gateway": ("--failover-timeout-s", "90")}
    model = save_slow_model(tmp_path / "model", num_key_value_heads=2)
    with running_cluster(model, prefill=0, decode=1, extra=extra) as cluster, logs_shown(pytestconfig, cluster):
        yield Scene(cluster)


@pytest.mark.slow
def test_the_only_worker_goes_on_with_its_streams_when_its_group_is_formed_anew(only_scene: Scene) -> None:
    """With what it had cached of them."""
    asked = asked_of(3, 200, 300)
    with only_scene.ask(asked) as answer:
        answer.wait(5)
        (rank,) = psutil.Process(only_scene.cluster.processes["decode-0"].pid).children()
        rank.kill()
        answer.wait(timeout_s=120)
        assert answer.error is None
    assert answer.token_ids == only_scene.answer_to(asked)
