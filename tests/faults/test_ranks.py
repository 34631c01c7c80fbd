"""Workers of two ranks in a real cluster: the death of one rank ends its worker, and no stream."""

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.faults.conftest import logs_shown
from tests.faults.scene import WORKER_FLAGS, Scene, save_slow_model
from tests.faults.states import paired
from tests.faults.streams import asked_of
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


def test_a_killed_rank_ends_its_worker_and_its_stream_goes_on_token_exact_with_another_width(
    ranks_scene: Scene,
) -> None:
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
        assert ranked.wait() == 1
        answer.wait()
        assert answer.error is None
        assert "rank 1 of 2 has ended, by signal 9" in ranked.log()
    assert answer.token_ids == ranks_scene.answer_to(asked), "which one rank alone gives"


@pytest.fixture
def prefill_scene(pytestconfig: pytest.Config, tmp_path: Path) -> Iterator[Scene]:
    """A prefill worker of two ranks, and a decode worker of one."""
    load_or_skip()
    extra = {"worker": WORKER_FLAGS, "prefill": ("--tp", "2"), "router": ("--max-local-tokens", "0")}
    model = save_slow_model(tmp_path / "model", num_key_value_heads=2)
    with running_cluster(model, prefill=1, decode=1, extra=extra) as cluster, logs_shown(pytestconfig, cluster):
        yield Scene(cluster)


def test_a_killed_rank_of_a_prefill_worker_costs_a_computation_only(prefill_scene: Scene) -> None:
    """It is stopped before, so that the hand-off is under way for certain."""
    prefill = prefill_scene.cluster.processes["prefill-0"]
    (rank,) = psutil.Process(prefill.pid).children()
    asked = asked_of(2, 200, 30)
    rank.suspend()
    with prefill_scene.ask(asked) as answer:
        assert paired(prefill_scene, answer, 0)["prefill"] == "prefill-0"
        rank.kill()
        assert prefill.wait() == 1
        answer.wait()
        assert answer.error is None
    assert answer.token_ids == prefill_scene.answer_to(asked), "which the decode worker alone gives"
