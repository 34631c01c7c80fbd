"""A worker that lives and is slow: set aside by what it takes, probed, and back once it keeps up."""

import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest

from tests.faults.conftest import logs_shown
from tests.faults.matrix import Matrix, Row
from tests.faults.scene import WORKER_FLAGS, Scene
from tests.faults.states import State
from tests.faults.streams import asked_of
from tests.helpers.cluster import ClusterProcess, running_cluster

SLOW = "decode-1"
RUNS_S, STANDS_S = 0.04, 0.6
NUM_CLIENTS = 3
NUM_REQUESTS = 60
SEEN_S = 60.0  # NOTE: generous; it takes three rounds of a second, and as long again where nobody sends it a request


@pytest.fixture(scope="module")
def wide_scene(pytestconfig: pytest.Config, slow_model: Path) -> Iterator[Scene]:
    """Three decode workers that compute short prompts themselves."""
    with (
        running_cluster(slow_model, decode=3, extra={"worker": WORKER_FLAGS}) as cluster,
        logs_shown(pytestconfig, cluster),
    ):
        yield Scene(cluster)


@contextmanager
def mostly_stopped(process: ClusterProcess) -> Iterator[None]:
    """It runs for 40 ms of every 640."""
    ended = threading.Event()

    def alternate() -> None:
        while not ended.wait(RUNS_S):
            process.stop()
            ended.wait(STANDS_S)
            process.cont()

    thread = threading.Thread(target=alternate, name=f"{process.name} is slow")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


class Load:
    """Clients that ask one short question after another."""

    def __init__(self, scene: Scene) -> None:
        self._scene = scene
        self._seeds = count()

    def asked(self, num_requests: int) -> Counter[str]:
        """Sends `num_requests` and counts those that each decode worker got."""
        with ThreadPoolExecutor(NUM_CLIENTS) as clients:
            return Counter(clients.map(lambda _: self._ask(), range(num_requests)))

    def ask_until(self, slowness_is_known: bool) -> None:
        """Ask until the router has set the slow worker aside, or has it in service."""
        deadline_s = time.monotonic() + SEEN_S
        while (self.slowness() is not None) != slowness_is_known:
            assert time.monotonic() < deadline_s, f"{SLOW} has slowness {self.slowness()} after {SEEN_S:g} s of load"
            self.asked(NUM_CLIENTS)

    def slowness(self) -> float | None:
        rows = {row["worker_id"]: row for row in self._scene.cluster.workers()}
        found: float | None = rows[SLOW]["slowness"]
        return found

    def _ask(self) -> str:
        answer = self._scene.finished(asked_of(next(self._seeds), 24, 24))
        assert answer.error is None, answer.error
        assert len(answer.token_ids) == 24
        return self._scene.pairing(answer)["decode"]


def test_a_slow_worker_gets_hardly_a_request_until_it_keeps_up_again(wide_scene: Scene, matrix: Matrix) -> None:
    """It kept a third of the requests, at 20 times the latency."""
    load, slow = Load(wide_scene), wide_scene.cluster.processes[SLOW]
    assert load.asked(NUM_REQUESTS)[SLOW] > NUM_REQUESTS / 6
    with mostly_stopped(slow):
        load.ask_until(slowness_is_known=True)
        shares = load.asked(NUM_REQUESTS)
        assert shares[SLOW] <= 4, shares
        assert load.slowness() is not None
        assert wide_scene.cluster.metrics("router-0")["tandem_router_workers"]["decode", "aside"] == 1
    load.ask_until(slowness_is_known=False)
    assert load.asked(NUM_REQUESTS)[SLOW] > NUM_REQUESTS / 6
    log = wide_scene.cluster.processes["router-0"].log()
    assert f"worker {SLOW} is set aside for 5 s" in log
    assert f"worker {SLOW} serves again" in log
    matrix.append(Row("decode, of three", State.DECODING, "runs 40 of 640 ms", "set aside, then back"))
