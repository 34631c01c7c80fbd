"""Workers of two pods each, groups of a LeaderWorkerSet: pods are killed and evicted under load, and no stream is lost.

The set's controller is stood in for (`tools.kubernetes.groups`); everything that it makes is real.
"""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.faults.streams import Known
from tests.images.load import Load, running_load
from tests.kubernetes.background import Background
from tests.kubernetes.conftest import NUM_PROMPTS, answered
from tests.kubernetes.journal import Journal
from tests.kubernetes.release import MODEL, Release, is_ready, merged, values_for
from tools.images import Images
from tools.kubernetes.api import Object
from tools.kubernetes.cluster import Cluster
from tools.kubernetes.groups import running_groups

AFTER = 6  # streams that start after a step and end before the test does
NUM_CLIENTS, NUM_GROUPS, SIZE = 3, 2, 2
PATIENCE_S = 300.0
OPERATORS_PORT = 8001
VICTIM = "tandem-decode-0"
POOLS = {pool: {"replicas": 1} for pool in ("gateway", "router", "prefill")}


@pytest.fixture(scope="module")
def controller(cluster: Cluster, background: Background, journal: Journal) -> Iterator[None]:
    """The controller that makes groups of pods, running."""
    with background.entered(running_groups(cluster.api, journal.tell)):
        yield


@pytest.fixture(scope="module", params=["tensor", "pipeline"])
def groups(
    cluster: Cluster,
    background: Background,
    images: Images,
    old_chart: Path,
    controller: None,
    journal: Journal,
    request: pytest.FixtureRequest,
) -> Iterator[Release]:
    """Installed, with every group ready; gone at the end. The pods of a group divide each layer, or the layers."""
    decode = {"replicas": NUM_GROUPS, "ranks": {request.param: SIZE, "hosts": SIZE}}
    release = Release(cluster, background, old_chart, merged(values_for(images), {**POOLS, "decode": decode}))
    begun_s = time.monotonic()
    release.install()
    release.until(lambda: len(whole_groups(release)) == NUM_GROUPS, "both groups ready", PATIENCE_S)
    took_s = time.monotonic() - begun_s
    journal.tell(f"{NUM_GROUPS} groups of {SIZE} pods by {request.param} ready {took_s:.1f} s after helm install")
    yield release
    release.uninstall()
    release.close()


@pytest.fixture(scope="module")
def known_of_groups(groups: Release) -> list[Known]:
    return [answered(groups.url, number) for number in range(NUM_PROMPTS)]


@pytest.fixture
def load(
    groups: Release, known_of_groups: list[Known], journal: Journal, request: pytest.FixtureRequest
) -> Iterator[Load]:
    """In the end no stream is lost."""
    label, begun_s = request.node.name.removeprefix("test_"), time.monotonic()
    with running_load(groups.url, MODEL, known_of_groups, label, NUM_CLIENTS) as load:
        yield load
    journal.tell(f"{label}: {load.tally}; {time.monotonic() - begun_s:.1f} s")
    assert not load.tally.lost, load.tally.lost
    assert load.tally.num_exact >= AFTER


def group_of(pod: Object) -> str:
    """Its leader's name: another pod of the group has it and a number."""
    name = str(pod["metadata"]["name"])
    return name if pod["metadata"]["labels"]["app.kubernetes.io/component"] == "decode" else name.rpartition("-")[0]


def whole_groups(release: Release) -> dict[str, list[Object]]:
    """Groups all of whose pods are ready, the leader first."""
    found: dict[str, list[Object]] = {}
    for pod in [*release.pods("decode"), *release.pods("decode-hosts")]:
        if is_ready(pod) and "deletionTimestamp" not in pod["metadata"]:
            found.setdefault(group_of(pod), []).append(pod)
    return {name: pods for name, pods in found.items() if len(pods) == SIZE}


def wait_anew(release: Release, former: list[Object]) -> float:
    """Until that group has no pod of before, and all are whole; how long it took, seconds."""
    name, gone = group_of(former[0]), {pod["metadata"]["uid"] for pod in former}

    def is_anew() -> bool:
        whole = whole_groups(release)
        return len(whole) == NUM_GROUPS and not gone & {pod["metadata"]["uid"] for pod in whole[name]}

    return release.until(is_anew, f"{name} made anew", PATIENCE_S)


def decode_workers(release: Release) -> dict[str, Object]:
    """Rows of the gateway for decode workers that are alive, by name, which is that of the leader's pod."""
    (gateway,) = release.pods("gateway")
    url = f"http://{gateway['status']['podIP']}:{OPERATORS_PORT}/admin/workers"
    rows = httpx.get(url, timeout=10, trust_env=False).json()["workers"]
    return {row["worker_id"]: row for row in rows if row["role"] == "decode" and row["is_alive"]}


def has_streams(release: Release, name: str) -> bool:
    return name in (found := decode_workers(release)) and found[name]["num_running"] > 0


def test_a_group_is_one_worker(groups: Release) -> None:
    groups.until(lambda: len(decode_workers(groups)) == NUM_GROUPS, "both workers found", PATIENCE_S)
    found = decode_workers(groups)
    assert {name: len(row["ranks"]["pids"]) for name, row in found.items()} == dict.fromkeys(whole_groups(groups), SIZE)


@pytest.mark.parametrize("victim", ["host", "leader"])
def test_killed(groups: Release, load: Load, journal: Journal, victim: str) -> None:
    """A pod's processes end without a word; its streams go on with the other group, token-exact."""
    former = whole_groups(groups)[VICTIM]
    pod = former[1 if victim == "host" else 0]["metadata"]
    first = int((groups.cluster.folder / "pods" / pod["uid"] / "decode.pid").read_text())
    groups.until(lambda: has_streams(groups, VICTIM), "streams of the group", PATIENCE_S)
    os.kill(first, signal.SIGKILL)
    took_s = wait_anew(groups, former)
    journal.tell(f"  {pod['name']} killed with streams; its group was whole again after {took_s:.1f} s")
    load.wait_more(AFTER, PATIENCE_S)


def test_evicted_host(groups: Release, load: Load, journal: Journal) -> None:
    """One budget holds for all pods of all groups; the whole group goes with the one that is evicted."""
    former = whole_groups(groups)
    groups.until(lambda: has_streams(groups, VICTIM), "streams of the group", PATIENCE_S)
    assert groups.evict(former[VICTIM][1]["metadata"]["name"])
    assert not groups.evict(former["tandem-decode-1"][1]["metadata"]["name"])
    took_s = wait_anew(groups, former[VICTIM])
    journal.tell(f"  a further host's pod evicted, another refused; the group was whole again after {took_s:.1f} s")
    load.wait_more(AFTER, PATIENCE_S)
