"""An operator's life with the chart, step by step, under load whose every token is compared. No stream is lost."""

import re
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.faults.streams import Known
from tests.images.load import Load, running_load
from tests.kubernetes.journal import Journal
from tests.kubernetes.release import MODEL, NAMESPACE, Release

AFTER = 6  # streams that start after a step and end before the test does
NUM_CLIENTS = 3
PATIENCE_S = 300.0
CLEAN_EXIT = re.compile(
    r"pod tandem-(prefill|decode|gateway|router|planner)\S* stopped in ([\d.]+) s of ([\d.]+) s grace: (.*)$"
)


@pytest.fixture
def load(release: Release, known: list[Known], journal: Journal, request: pytest.FixtureRequest) -> Iterator[Load]:
    """In the end no stream is lost, and every pod that was stopped meanwhile ended by itself."""
    label = request.node.name.removeprefix("test_")
    begun_s, first_line = time.monotonic(), len(journal.lines)
    with running_load(release.url, MODEL, known, label, NUM_CLIENTS) as load:
        yield load
    journal.tell(f"{label}: {load.tally}; {time.monotonic() - begun_s:.1f} s")
    assert not load.tally.lost, load.tally.lost
    assert load.tally.num_exact >= AFTER
    assert_stopped_well(journal.lines[first_line:])


def assert_stopped_well(lines: list[str]) -> None:
    for match in filter(None, map(CLEAN_EXIT.search, lines)):
        assert match[4].endswith("exit 0"), match[0]
        assert float(match[2]) < float(match[3]), match[0]


def test_install(release: Release, journal: Journal) -> None:
    begun_s = time.monotonic()
    release.install()
    for component in ("redis", "router", "gateway", "prefill", "decode"):
        assert release.ready(component)
    journal.tell(f"helm install --wait: {len(release.pods())} pods ready in {time.monotonic() - begun_s:.1f} s")


def test_helm_test(release: Release, journal: Journal) -> None:
    begun_s = time.monotonic()
    release.test()
    journal.tell(f"helm test passed in {time.monotonic() - begun_s:.1f} s")


def test_undisturbed(load: Load) -> None:
    load.wait_more(3 * AFTER, PATIENCE_S)


@pytest.mark.parametrize("component", ["prefill", "decode"])
def test_scaled(release: Release, load: Load, journal: Journal, component: str) -> None:
    took_s = release.scale(component, 3)
    journal.tell(f"  {component} scaled from 2 to 3 in {took_s:.1f} s")
    load.wait_more(AFTER, PATIENCE_S)
    took_s = release.scale(component, 1)
    journal.tell(f"  {component} scaled from 3 to 1 in {took_s:.1f} s")
    load.wait_more(AFTER, PATIENCE_S)
    release.scale(component, 2)


def test_decode_restarted(release: Release, load: Load, journal: Journal) -> None:
    before = release.ready("decode")
    took_s = release.restart("decode")
    assert not before & release.ready("decode")
    journal.tell(f"  rolling restart of decode in {took_s:.1f} s")
    load.wait_more(AFTER, PATIENCE_S)


def test_release_upgraded(release: Release, load: Load, journal: Journal) -> None:
    pools = ("gateway", "router", "prefill", "decode")
    before = {pool: release.ready(pool) for pool in pools}
    begun_s = time.monotonic()
    release.upgrade({pool: {"podAnnotations": {"tandem.dev/build": "2"}} for pool in pools})
    for pool in pools:
        assert not before[pool] & release.ready(pool)
    journal.tell(f"  helm upgrade --wait replaced every pod of four pools in {time.monotonic() - begun_s:.1f} s")
    load.wait_more(AFTER, PATIENCE_S)


def test_evicted(release: Release, load: Load, journal: Journal) -> None:
    first, second = sorted(release.ready("decode"))
    assert release.evict(first)
    assert not release.evict(second)
    journal.tell(f"  {first} evicted; {second} refused with 429 by the disruption budget")
    took_s = release.wait_rolled_out("decode")
    journal.tell(f"  decode whole again after {took_s:.1f} s")
    load.wait_more(AFTER, PATIENCE_S)


def test_node_drained(release: Release, load: Load, journal: Journal) -> None:
    node = next(pod["spec"]["nodeName"] for pod in release.pods("decode"))
    begun_s = time.monotonic()
    release.patch(f"/api/v1/nodes/{node}", {"spec": {"unschedulable": True}})
    num_refused = 0
    leaving = {pod["metadata"]["name"] for pod in release.pods() if pod["spec"]["nodeName"] == node}

    def is_empty() -> bool:
        nonlocal num_refused
        left = [pod for pod in release.pods() if pod["spec"].get("nodeName") == node]
        staying = [pod["metadata"]["name"] for pod in left if "deletionTimestamp" not in pod["metadata"]]
        num_refused += sum(not release.evict(name) for name in staying)
        return not left

    release.until(is_empty, f"{node} empty")
    journal.tell(
        f"  {node} drained of {len(leaving)} pods in {time.monotonic() - begun_s:.1f} s; "
        f"{num_refused} evictions refused on the way"
    )
    release.patch(f"/api/v1/nodes/{node}", {"spec": {"unschedulable": False}})
    for component in ("gateway", "router", "prefill", "decode"):
        release.wait_rolled_out(component)
    load.wait_more(AFTER, PATIENCE_S)


def test_discovered_by_kubernetes(release: Release, load: Load, journal: Journal) -> None:
    begun_s = time.monotonic()
    release.upgrade({"discovery": {"mode": "kubernetes"}})
    journal.tell(f"  discovery.mode=kubernetes: routers replaced in {time.monotonic() - begun_s:.1f} s")
    load.wait_more(AFTER, PATIENCE_S)
    took_s = release.scale("decode", 3)
    load.wait_more(AFTER, PATIENCE_S)
    release.scale("decode", 2)
    journal.tell(f"  a third decode worker found through the API, {took_s:.1f} s after it was asked for")
    load.wait_more(AFTER, PATIENCE_S)


def test_load_job(release: Release, journal: Journal) -> None:
    """The chart's own load test, as a Job in the cluster, which fails when too few answers came in time."""
    begun_s = time.monotonic()
    asked = {
        "concurrency": 2,
        "requests": 16,
        "promptTokens": "64-256",
        "outputTokens": "24",
        "failBelowAttainment": 0.9,
    }
    release.upgrade({"load": {"enabled": True, "settings": {**asked, "ttftMs": 5000, "tpotMs": 500}}})

    def has_succeeded() -> bool:
        (job,) = release.get(f"/apis/batch/v1/namespaces/{NAMESPACE}/jobs")["items"]
        assert not job["status"].get("failed"), job["status"]
        return bool(job["status"].get("succeeded"))

    release.until(has_succeeded, "the load test's Job done", PATIENCE_S)
    journal.tell(f"the chart's load Job: 16 requests met their objectives, after {time.monotonic() - begun_s:.1f} s")
    release.upgrade({"load": {"enabled": False}})


def test_planned(release: Release, load: Load, journal: Journal) -> None:
    """The planner acts: an objective that two decode workers cannot meet makes it ask for more."""
    settings = {"intervalS": 2, "warmupS": 2, "holdS": 20, "startupS": 15, "yieldS": 0}
    planner = {
        "enabled": True,
        "mode": "act",
        "slo": {"ttftMs": 300, "tpotMs": 2},
        "limits": {"prefill": {"min": 1, "max": 3}, "decode": {"min": 1, "max": 3}},
        "resources": {"requests": {"cpu": "100m", "memory": "128Mi"}, "limits": {"memory": "1Gi"}},
        "settings": settings,
    }
    begun_s = time.monotonic()
    release.upgrade({"planner": planner})
    release.until(lambda: len(release.ready("decode")) == 3, "3 decode workers by the planner's word", PATIENCE_S)
    journal.tell(f"  the planner scaled decode to 3 in {time.monotonic() - begun_s:.1f} s: {planned(release)}")
    load.wait_more(AFTER, PATIENCE_S)
    begun_s = time.monotonic()
    release.upgrade({"planner": {"slo": {"ttftMs": 60000, "tpotMs": 10000}}})
    release.until(lambda: len(release.ready("decode")) == 1, "1 decode worker by the planner's word", 2 * PATIENCE_S)
    journal.tell(
        f"  with an easy objective it scaled decode to 1 in {time.monotonic() - begun_s:.1f} s: {planned(release)}"
    )
    load.wait_more(AFTER, PATIENCE_S)


def planned(release: Release) -> str:
    """The planner's last reason."""
    address = next(pod["status"]["podIP"] for pod in release.pods("planner"))
    answer = httpx.get(f"http://{address}:7951/plan", timeout=10)
    return str(answer.json()["plan"]["reason"])


def test_uninstall(release: Release, journal: Journal) -> None:
    begun_s = time.monotonic()
    release.uninstall()
    secrets = release.get(f"/api/v1/namespaces/{NAMESPACE}/secrets")["items"]
    assert not [one for one in secrets if one["metadata"]["name"].startswith("tandem-secrets")]
    journal.tell(f"helm uninstall: every pod drained and gone in {time.monotonic() - begun_s:.1f} s")
