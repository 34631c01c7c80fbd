"""One cluster for all fault tests, with a survivor for every death, and the matrix of what became of each fault."""

import random
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tandem.process.ports import free_ports
from tandem.rpc.messages import WorkerAddress
from tests.faults.matrix import Matrix, property_of
from tests.faults.scene import WORKER_FLAGS, Scene, save_slow_model
from tests.faults.streams import Asked, Known, asked_of
from tests.helpers.cluster import Cluster, ClusterProcess, running_cluster
from tests.helpers.redis_server import RedisServer, running_redis

WAIT_S = 6.0  # for a worker, where nobody can take its place
GATEWAY_FLAGS = ("--failover-timeout-s", f"{WAIT_S:g}")
ROUTER_FLAGS = ("--max-local-tokens", "512")  # NOTE: so that the prompts here have a prefill worker
_CLUSTERS = pytest.StashKey[list[Cluster]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_CLUSTERS] = []


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Excludes earlier logs of the processes from a failure's report, whose reason they would bury."""
    for cluster in item.config.stash[_CLUSTERS]:
        for process in cluster.processes.values():
            process.mark_log()
    yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failure shows what all processes, of every cluster that runs, have written in the test."""
    report = yield
    if report.failed:
        report.sections += [("processes", cluster.logs()) for cluster in item.config.stash[_CLUSTERS]]
    return report


@contextmanager
def logs_shown(config: pytest.Config, cluster: Cluster) -> Iterator[None]:
    """While inside, failures show this cluster's logs."""
    clusters = config.stash[_CLUSTERS]
    clusters.append(cluster)
    yield
    clusters.remove(cluster)


@pytest.fixture
def matrix(request: pytest.FixtureRequest) -> Iterator[Matrix]:
    """Rows in which a test records the outcome of its fault."""
    rows: Matrix = []
    yield rows
    request.node.user_properties += map(property_of, rows)


@pytest.fixture(scope="package")
def slow_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_slow_model(tmp_path_factory.mktemp("models") / "slow")


@pytest.fixture(scope="package")
def redis() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


@pytest.fixture(scope="package")
def running_scene(pytestconfig: pytest.Config, slow_model: Path, redis: RedisServer) -> Iterator[Scene]:
    extra = {"worker": WORKER_FLAGS, "router": ROUTER_FLAGS}
    with (
        running_cluster(
            slow_model, prefill=2, decode=2, routers=2, gateways=2, redis=redis.url, extra=extra
        ) as cluster,
        logs_shown(pytestconfig, cluster),
    ):
        running = Scene(cluster, redis)
        running.heal()
        yield running


@pytest.fixture(scope="package", params=["auto", pytest.param("tcp", marks=pytest.mark.slow)])
def running_small_scene(
    request: pytest.FixtureRequest, pytestconfig: pytest.Config, slow_model: Path
) -> Iterator[Scene]:
    extra = {"worker": WORKER_FLAGS, "router": ROUTER_FLAGS, "gateway": GATEWAY_FLAGS}
    with (
        running_cluster(slow_model, transport=request.param, extra=extra) as cluster,
        logs_shown(pytestconfig, cluster),
    ):
        running = Scene(cluster)
        running.heal()
        yield running


@pytest.fixture(scope="package")
def hidden(running_small_scene: Scene, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerAddress]:
    """A prefill worker that nobody is told of, to stand behind a middleman."""
    spec = running_small_scene.cluster.processes["prefill-0"].spec
    port, metrics_port = free_ports(2, "127.0.0.1", random.Random())
    argv = list(spec.argv)
    for flag, value in (("--bind", f"127.0.0.1:{port}"), ("--metrics-port", str(metrics_port)), ("--routers", "")):
        argv[argv.index(flag) + 1] = value
    url = f"http://127.0.0.1:{metrics_port}/health"
    process = ClusterProcess(replace(spec, argv=tuple(argv), ready_url=url), Path(tmp_path_factory.mktemp("hidden")))
    process.start()
    try:
        process.wait_ready()
        yield WorkerAddress("hidden", f"127.0.0.1:{port}")
    finally:
        process.kill()


@pytest.fixture
def small_scene(running_small_scene: Scene) -> Scene:
    """One process of each kind and no Redis: nobody can take anyone's place."""
    running_small_scene.heal()
    return running_small_scene


@pytest.fixture
def scene(running_scene: Scene) -> Scene:
    """Everything runs, everybody sees everybody, nothing is held."""
    running_scene.heal()
    return running_scene


@pytest.fixture(scope="package")
def known(running_scene: Scene) -> dict[float, Known]:
    """By temperature: a long prompt and a mid-sized answer."""
    return known_to(running_scene)


@pytest.fixture(scope="package")
def small_known(running_small_scene: Scene) -> dict[float, Known]:
    """The same in the small cluster."""
    return known_to(running_small_scene)


def known_to(scene: Scene) -> dict[float, Known]:
    found = {}
    for temperature in (0.0, 0.8):
        asked = asked_of(1, 1000, 48, temperature)
        found[temperature] = Known(asked, scene.answer_to(asked))
    other = asked_of(2, 1000, 48)
    assert scene.answer_to(other) != found[0.0].token_ids, "the model does not heed its prompt"
    return found


SHORT = asked_of(3, 24, 2)


@pytest.fixture(scope="package")
def short() -> Asked:
    """A new request that takes next to nothing."""
    return SHORT
