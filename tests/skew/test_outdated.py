"""A release without a common protocol in one cluster: a clear 503 and a line in the log, no crash, and it recovers."""

import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.helpers.cluster import ROOT, Cluster, ClusterProcess, running_cluster
from tests.helpers.secret import SECRET
from tests.skew.test_neighbours import DEMO, FLAGS

BODY = {"model": "tandem-demo", "prompt": "def add(a, b):", "max_tokens": 4, "temperature": 0}
PATIENCE_S = 20.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running_cluster(DEMO, extra={**FLAGS, "gateway": ("--failover-timeout-s", "1")}) as cluster:
        yield cluster


def start_as(process: ClusterProcess, root: Path) -> None:
    """Without waiting: what nobody talks to is not ready."""
    process.kill()
    process.root = root
    process.start()


def asked(cluster: Cluster) -> httpx.Response:
    """Once the gateway listens."""
    found: list[httpx.Response] = []

    def is_answered() -> bool:
        found.append(httpx.post(f"{cluster.url}/v1/completions", json=BODY, timeout=PATIENCE_S, trust_env=False))
        return True

    cluster.wait(is_answered, 90.0)
    return found[-1]


def expect_outage(cluster: Cluster) -> httpx.Response:
    """A 503 within seconds that keeps to itself what is the operator's."""
    answer = asked(cluster)
    assert answer.elapsed.total_seconds() < PATIENCE_S
    assert answer.status_code == 503, answer.text
    assert int(answer.headers["retry-after"]) > 0
    assert SECRET.decode() not in answer.text
    assert SECRET.decode() not in cluster.logs()
    assert not [process.name for process in cluster.processes.values() if not process.is_running()]
    assert "Traceback" not in cluster.logs()
    return answer


def expect_recovery(cluster: Cluster) -> None:
    cluster.start()
    cluster.wait(lambda: asked(cluster).status_code == 200, 30.0)


def expect_said(process: ClusterProcess, *words: str) -> None:
    """In one line of what it has written since it was marked."""
    deadline_s = time.monotonic() + PATIENCE_S
    while not any(all(word in line for word in words) for line in process.tail().splitlines()):
        assert time.monotonic() < deadline_s, f"{words} are not in one line of:\n{process.tail()}"
        time.sleep(0.05)


@pytest.mark.timeout(600)
def test_an_outdated_router(cluster: Cluster, outdated: Path) -> None:
    router, gateway = cluster.processes["router-0"], cluster.processes["gateway"]
    try:
        start_as(router, outdated)
        router.wait_ready()
        # NOTE: a gateway that had not found its new router listening yet says that none answers
        cluster.wait(lambda: asked(cluster).json()["error"]["code"] == "incompatible_releases", PATIENCE_S)
        answer = expect_outage(cluster)
        assert answer.json()["error"]["code"] == "incompatible_releases"
        assert "127.0.0.1" not in answer.text
        expect_said(gateway, router.bound_address, "speaks protocol 1", "this process speaks 2 to 2")
        expect_said(cluster.processes["decode-0"], router.bound_address, "speaks protocol 1", "speaks 2 to 2")
    finally:
        start_as(router, ROOT)
    expect_recovery(cluster)


@pytest.mark.timeout(600)
def test_an_outdated_gateway(cluster: Cluster, outdated: Path) -> None:
    router, gateway = cluster.processes["router-0"], cluster.processes["gateway"]
    try:
        start_as(gateway, outdated)
        expect_outage(cluster)
        expect_said(router, "127.0.0.1", "speaks protocol '1'", "this process 2 to 2")
        expect_said(gateway, "speaks protocol '1'", "this process 2 to 2")
    finally:
        start_as(gateway, ROOT)
    expect_recovery(cluster)


@pytest.mark.timeout(600)
def test_an_outdated_worker(cluster: Cluster, outdated: Path) -> None:
    router, decode = cluster.processes["router-0"], cluster.processes["decode-0"]
    try:
        start_as(decode, outdated)
        decode.wait_ready()
        expect_outage(cluster)
        expect_said(decode, router.bound_address, "protocol '1'", "this process 2 to 2")
        expect_said(router, "speaks protocol '1'", "this process 2 to 2")
    finally:
        start_as(decode, ROOT)
    expect_recovery(cluster)
