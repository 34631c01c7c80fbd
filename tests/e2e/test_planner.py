"""The planner's own process beside a real cluster that serves the demo checkpoint.

It advises from real traffic; and it writes replicas to a Kubernetes API, which is the in-repo one.
"""

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.helpers.cluster import ROOT, Cluster, running_cluster
from tests.helpers.kube_fake import KubeFake, running_fake
from tests.helpers.planner_process import PATIENT_S, PlannerProcess

DEMO = ROOT / "demo" / "tandem-demo"
WORKER_FLAGS = ("--dtype", "float32", "--kv-cache-gib", "0.25")
PROMPT = "def add(a, b):\n    return a + b\n\n" * 6


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    flags = {"worker": WORKER_FLAGS, "router": ("--max-local-tokens", "0")}
    with running_cluster(DEMO, extra=flags) as cluster:
        yield cluster


@pytest.fixture
def start(cluster: Cluster, tmp_path: Path) -> Iterator[Callable[..., PlannerProcess]]:
    with contextlib.ExitStack() as opened:

        def started(*flags: str, env: dict[str, str] | None = None) -> PlannerProcess:
            planner = PlannerProcess(cluster, tmp_path, *flags, env=env)
            opened.callback(planner.close)
            return planner

        yield started


def ask(cluster: Cluster, number: int = 0) -> None:
    body = {"model": cluster.model, "prompt": f"{PROMPT}# {number}", "max_tokens": 24, "ignore_eos": True}
    httpx.post(f"{cluster.url}/v1/completions", json=body, trust_env=False, timeout=60.0).raise_for_status()


@contextlib.contextmanager
def load(cluster: Cluster, num_clients: int = 3) -> Iterator[None]:
    """Requests one after the other from so many clients, for the time of the block."""
    ended = threading.Event()

    def client(first: int) -> None:
        number = first
        while not ended.is_set():
            ask(cluster, number)
            number += num_clients

    with concurrent.futures.ThreadPoolExecutor(num_clients) as pool:
        clients = [pool.submit(client, first) for first in range(num_clients)]
        try:
            yield
        finally:
            ended.set()
            for one in clients:
                one.result()


def has_everything(page: dict[str, Any]) -> bool:
    """Whether one window had some of all there is to see, and nothing was missing."""
    seen, measured = page["observation"], page["measured"]
    return not page["problems"] and all(
        (
            seen["traffic"]["num_finished"],
            seen["traffic"]["num_cached_tokens"],
            seen["prefill"]["speed"],
            seen["decode"]["speed"],
            measured["ttft"]["mean_ms"],
            measured["tpot"]["share_ms"],
            page["plan"]["then"],
        )
    )


def test_from_real_traffic_comes_a_plan_with_its_reason(cluster: Cluster, start: Callable[..., PlannerProcess]) -> None:
    planner = start("--ttft-ms", "60000", "--tpot-ms", "60000")
    with load(cluster):
        page = planner.wait(has_everything)
    seen, plan = page["observation"], page["plan"]
    assert (page["mode"], page["is_leader"]) == ("advise", False)
    assert plan["reason"]
    assert plan["then"]["meets_slo"]
    for action, wanted in zip(page["actions"], (plan["num_prefill"], plan["num_decode"]), strict=True):
        assert (action["num_before"], action["num_planned"], action["num_asked"]) == (1, wanted, 1)
        assert action["outcome"] == ("unchanged" if wanted == 1 else "advised")
    traffic = seen["traffic"]
    assert abs(traffic["num_output_tokens"] - 24 * traffic["num_finished"]) <= 24
    assert 0 < traffic["num_cached_tokens"] < traffic["num_prompt_tokens"]
    assert seen["ttft_ms"] == page["measured"]["ttft"]["mean_ms"]
    assert (seen["prefill"]["num_ready"], seen["decode"]["num_ready"]) == (1, 1)
    assert seen["decode"]["kv_tokens"] > 1000
    assert planner.metrics()["tandem_planner_replicas_ready", "decode"] == 1
    assert planner.terminate() == 0


def test_an_objective_out_of_reach_is_admitted(cluster: Cluster, start: Callable[..., PlannerProcess]) -> None:
    planner = start("--tpot-ms", "0.001", "--max-decode", "3", "--log-format", "json")
    with load(cluster):
        page = planner.wait(lambda page: page["plan"]["warnings"] and page["plan"]["then"])
    assert not page["plan"]["then"]["meets_slo"]
    assert page["plan"]["num_decode"] <= 3
    assert '"warnings"' in planner.log()


def test_a_gateway_that_starts_again_is_no_burst_and_no_end(
    cluster: Cluster, start: Callable[..., PlannerProcess]
) -> None:
    planner = start("--ttft-ms", "60000", "--tpot-ms", "60000")
    for number in range(20):
        ask(cluster, number)
    planner.wait(lambda page: page["plan"])
    gateway = cluster.processes["gateway"]
    gateway.kill()
    planner.wait(lambda page: any("is not counted" in problem for problem in page["problems"]))
    gateway.restart()
    began_s = planner.wait(lambda page: not page["problems"])["at_s"]
    cluster.wait(lambda: httpx.get(f"{cluster.url}/ready", trust_env=False).status_code == 200, PATIENT_S)
    ask(cluster)
    page = planner.wait(lambda page: page["at_s"] > began_s and page["observation"]["traffic"]["num_requests"])
    assert page["observation"]["traffic"]["num_requests"] == 1


@contextlib.contextmanager
def fake_api(directory: Path) -> Iterator[tuple[KubeFake, Path]]:
    """An API server in a thread of its own, and the kubeconfig that leads to it."""
    ready: concurrent.futures.Future[KubeFake] = concurrent.futures.Future()
    loop = asyncio.new_event_loop()
    ended = asyncio.Event()

    async def serve() -> None:
        async with running_fake() as fake:
            for name in ("p", "d"):
                fake.put_deployment(name, 1)
            ready.set_result(fake)
            await ended.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        fake = ready.result(20.0)
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "fake",
            "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": "fake", "namespace": "default"}}],
            "clusters": [{"name": "fake", "cluster": {"server": fake.url}}],
            "users": [{"name": "fake", "user": {"token": fake.rules.admin_token}}],
        }
        path = directory / "kubeconfig"
        path.write_text(yaml.safe_dump(config))
        yield fake, path
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join()
        loop.close()


def test_told_to_act_it_writes_what_it_plans(
    cluster: Cluster, start: Callable[..., PlannerProcess], tmp_path: Path
) -> None:
    with fake_api(tmp_path) as (fake, kubeconfig):
        names = {"TANDEM_PREFILL_DEPLOYMENT": "p", "TANDEM_DECODE_DEPLOYMENT": "d", "KUBECONFIG": str(kubeconfig)}
        planner = start("--mode", "act", "--max-prefill", "1", "--min-decode", "2", "--max-decode", "2", env=names)
        with load(cluster, 1):
            page = planner.wait(lambda page: page["actions"][1]["num_before"] == 2)
        assert page["is_leader"]
        assert [action["outcome"] for action in page["actions"]] == ["unchanged", "unchanged"]
        assert (fake.num_replicas("p"), fake.num_replicas("d")) == (1, 2)
        assert "decode 1 -> 2 (written)" in planner.log()
        assert planner.terminate() == 0
        assert fake.holder("tandem-planner") == ""
