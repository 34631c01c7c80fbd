"""A worker whose ranks are on two hosts in a real cluster: a lost host costs no stream and ends its worker."""

import random
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tandem.process.ports import free_ports
from tests.faults.conftest import logs_shown
from tests.faults.scene import WORKER_FLAGS, Scene, save_slow_model
from tests.faults.streams import PATIENCE_S, asked_of
from tests.helpers.cluster import running_cluster
from tests.helpers.native_kernels import load_or_skip
from tests.helpers.rank_hosts import rank_host


@pytest.fixture
def hosts_scene(pytestconfig: pytest.Config, tmp_path: Path) -> Iterator[tuple[Scene, psutil.Popen]]:
    """A worker of two hosts and one of a single rank, which both compute prompts themselves; the further host."""
    load_or_skip()
    (port,) = free_ports(1, "127.0.0.1", random.Random())
    ranked = ("--tp", "2", "--hosts", "2", "--ranks-bind", f"127.0.0.1:{port}")
    model = save_slow_model(tmp_path / "model", num_key_value_heads=2)
    with (
        rank_host(port) as host,
        running_cluster(model, prefill=0, decode=2, extra={"worker": WORKER_FLAGS, "decode-0": ranked}) as cluster,
        logs_shown(pytestconfig, cluster),
    ):
        yield Scene(cluster), host


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_a_lost_host_costs_no_stream_and_its_worker_serves_when_both_are_started_again(
    hosts_scene: tuple[Scene, psutil.Popen], number: signal.Signals
) -> None:
    """The stream goes on token-exact on a worker of another pool; the worker ends, since KV of its ranks is lost."""
    scene, host = hosts_scene
    ranked, single = (scene.cluster.processes[name] for name in ("decode-0", "decode-1"))
    asked = asked_of(1, 200, 300, temperature=0.8)
    single.stop()
    with scene.ask(asked) as answer:
        answer.wait(5)
        assert scene.pairing(answer)["decode"] == "decode-0"
        single.cont()
        scene.cluster.wait(lambda: all(not row.get("unreachable") for row in scene.cluster.workers()))
        (rank,) = host.children()
        host.send_signal(number)
        answer.wait()
        assert answer.error is None
        assert scene.pairing(answer)["decode"] == "decode-1"
    assert answer.token_ids == scene.answer_to(asked), "which one rank alone gives"
    assert ranked.wait(PATIENCE_S) != 0
    host.kill()
    assert psutil.wait_procs([rank], timeout=PATIENCE_S)[1] == [], "no rank is left of it"
    with rank_host(int(ranked.spec.argv[ranked.spec.argv.index("--ranks-bind") + 1].rpartition(":")[2])):
        ranked.restart()
        scene.cluster.wait(lambda: all(not row.get("unreachable") for row in scene.cluster.workers()))
        single.stop()
        with scene.ask(asked) as again:
            again.wait()
            assert scene.pairing(again)["decode"] == "decode-0"
        single.cont()
    assert again.token_ids == answer.token_ids
