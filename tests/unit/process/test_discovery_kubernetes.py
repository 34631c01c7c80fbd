"""Pods as workers: which of them count, and a whole router that finds them through the Kubernetes API."""

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tandem.core.chain_hasher import ChainHasher
from tandem.core.errors import ConfigurationError, LocalityUnavailableError, UnavailableError
from tandem.core.scope import UNSCOPED
from tandem.kube.api import open_api
from tandem.kube.pod import Pod
from tandem.kube.pod_watch import WatchTerms
from tandem.process.discovery_kubernetes import KubernetesDiscovery, record_of
from tandem.process.fleet_view import Chain
from tandem.router.process import RouterProcess, serving_router
from tandem.routing.snapshot import Role
from tandem.rpc.client import RouterClient
from tandem.rpc.messages import PairCall, PairingAnswer, Registration, WorkerAddress, WorkerRecord
from tests.helpers.callers import RouterCaller
from tests.helpers.impostor import impostor
from tests.helpers.kube_fake import KubeFake, running_fake
from tests.helpers.kube_fake.gate import gate_before
from tests.unit.process.stub_workers import (
    PATIENT_S,
    StubWorker,
    eventually,
    record,
    router_settings,
    serving_worker,
    status,
)

SELECTOR = "app.kubernetes.io/name=tandem,tandem.dev/role"
LABELS = {"app.kubernetes.io/name": "tandem", "tandem.dev/role": "decode", "tandem.dev/model": "m"}
QUICK = WatchTerms(first_backoff_s=0.02, max_backoff_s=0.1)
CALL = PairCall(request_id="r", model="m", token_ids=tuple(range(64)), num_expected_output=10, scope=UNSCOPED)
READY = Pod(name="d0", ip="10.0.0.1", labels=LABELS, ready=True, ports={"grpc": 7900, "metrics": 7901})


def changed(**fields: Any) -> Pod:
    kept = {name: getattr(READY, name) for name in ("name", "ip", "labels", "ready", "ports")}
    return Pod(**{**kept, **fields})


def test_a_pod_is_called_at_its_port_named_grpc() -> None:
    wanted = WorkerRecord(WorkerAddress("d0", "10.0.0.1:7900"), role="decode", model="m", pool="")
    assert record_of(READY) == wanted
    found = record_of(changed(ip="fd00::1"))
    assert found is not None
    assert found.worker.address == "[fd00::1]:7900"


@pytest.mark.parametrize("fields", [{"ip": ""}, {"ready": False}, {"deleting": True}, {"ports": {"metrics": 7901}}])
def test_pods_that_cannot_be_given_requests_are_left_out(fields: dict[str, Any]) -> None:
    assert record_of(changed(**fields)) is None


@contextlib.asynccontextmanager
async def looking(fake: KubeFake, **fields: Any) -> AsyncIterator[KubernetesDiscovery]:
    discovery = KubernetesDiscovery(open_api(fake.access(), timeout_s=PATIENT_S), SELECTOR, QUICK, **fields)
    try:
        yield discovery
    finally:
        await discovery.close()


def test_the_first_question_waits_for_the_list_but_not_for_ever() -> None:
    async def scenario() -> None:
        async with running_fake() as fake, gate_before("127.0.0.1", fake.port) as gate:
            fake.put_pod("d0", ip="10.0.0.1", labels=LABELS)
            gate.hold()
            fake.port = gate.port
            async with looking(fake, first_wait_s=0.05) as discovery:
                for _ in range(2):
                    with pytest.raises(LocalityUnavailableError, match="not listed the pods yet"):
                        await discovery.workers()
                gate.let_go()
                await eventually_listed(discovery)
            async with looking(fake) as discovery:
                assert [found.worker.worker_id for found in await discovery.workers()] == ["d0"]

    asyncio.run(scenario())


async def eventually_listed(discovery: KubernetesDiscovery) -> None:
    async with asyncio.timeout(PATIENT_S):
        while True:
            with contextlib.suppress(LocalityUnavailableError):
                await discovery.workers()
                return
            await asyncio.sleep(0.01)


def test_a_missing_rule_reaches_whoever_asks() -> None:
    async def scenario() -> None:
        async with running_fake() as fake:
            fake.rules.grant("router", [])
            discovery = KubernetesDiscovery(open_api(fake.access("router")), SELECTOR, QUICK, first_wait_s=PATIENT_S)
            with pytest.raises(LocalityUnavailableError, match=r"resources: \['pods'\], verbs: \[get, list, watch\]"):
                await discovery.workers()
            await discovery.close()

    asyncio.run(scenario())


def test_announcing_is_harmless_and_closing_leaves_nothing() -> None:
    async def scenario() -> None:
        async with running_fake() as fake:
            async with looking(fake) as discovery:
                await discovery.announce(record("d0"))
                await discovery.withdraw(record("d0"))
                assert list(await discovery.workers()) == []
            async with looking(fake):
                pass
            assert not [task for task in asyncio.all_tasks() if task.get_name() == "pods"]

    asyncio.run(scenario())


# --- a whole router


@pytest.fixture
def kubeconfig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "kubeconfig"
    monkeypatch.setenv("KUBECONFIG", str(path))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    return path


def write_kubeconfig(path: Path, fake: KubeFake) -> None:
    document = {
        "current-context": "x",
        "clusters": [{"name": "c", "cluster": {"server": fake.url}}],
        "users": [{"name": "u", "user": {"token": fake.rules.admin_token}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u", "namespace": "prod"}}],
    }
    path.write_text(json.dumps(document))


def with_router(path: Path, scenario: Any, **fields: Any) -> None:
    async def main() -> None:
        async with running_fake() as fake:
            write_kubeconfig(path, fake)
            async with serving_router(router_settings(discovery="kubernetes", **fields)) as router:
                client = RouterCaller(router.address)
                try:
                    await scenario(fake, router, client)
                finally:
                    await client.close()

    asyncio.run(asyncio.wait_for(main(), 6 * PATIENT_S))


async def paired(client: RouterClient) -> PairingAnswer:
    async with asyncio.timeout(PATIENT_S):
        while True:
            with contextlib.suppress(UnavailableError):
                return await client.pair(CALL)
            await asyncio.sleep(0.01)


def put_worker(fake: KubeFake, name: str, address: str, **fields: Any) -> None:
    host, _, port = address.rpartition(":")
    fake.put_pod(name, "prod", ip=host, ports={"grpc": int(port)}, labels=LABELS, node="n", **fields)


def test_ready_pods_are_paired_and_a_pod_that_drains_keeps_its_watch(kubeconfig: Path) -> None:
    async def scenario(fake: KubeFake, router: RouterProcess, client: RouterClient) -> None:
        stub = StubWorker(status("d0", Role.DECODE))
        async with serving_worker(stub) as server:
            put_worker(fake, "d0", server.address, ready=False)
            await eventually(lambda: "watch pods" in fake.calls)
            assert stub.num_watchers == 0
            put_worker(fake, "d0", server.address)
            assert (await paired(client)).decode.worker_id == "d0"
            fake.end_pod("d0", "prod")
            stub.tell(status("d0", Role.DECODE, lifecycle="draining"))
            await eventually(lambda: [one.status.lifecycle for one in router.service._view.listings()] == ["draining"])
            for _ in range(3):
                router.service._watch.wake()
                await asyncio.sleep(0)
            assert stub.num_watchers == 1

    with_router(kubeconfig, scenario)


def test_a_pod_with_the_labels_of_a_worker_is_sent_nothing_without_proof(kubeconfig: Path) -> None:
    """Permission to label pods does not suffice to make a worker."""

    async def scenario(fake: KubeFake, router: RouterProcess, client: RouterClient) -> None:
        async with impostor(lambda data: data) as (address, called):
            put_worker(fake, "d0", address)
            await eventually(lambda: len(called) >= 3)
            with pytest.raises(UnavailableError):
                await client.pair(CALL)
            assert set(called) == {"Open"}, "asked for a proof, and told nothing"
            assert list(await client.workers()) == []

    with_router(kubeconfig, scenario)


def test_an_outage_of_the_api_loses_no_worker_and_a_new_one_is_found_after_it(kubeconfig: Path) -> None:
    async def scenario(fake: KubeFake, router: RouterProcess, client: RouterClient) -> None:
        async with (
            serving_worker(StubWorker(status("d0", Role.DECODE))) as first,
            serving_worker(StubWorker(status("p0", Role.PREFILL))) as second,
        ):
            put_worker(fake, "d0", first.address)
            await paired(client)
            await fake.stop()
            await eventually(lambda: router.service._watch._is_blind)
            assert (await client.pair(CALL)).decode.worker_id == "d0"
            put_worker(fake, "p0", second.address)
            await fake.start()
            await eventually(lambda: len(router.service._view.listings()) == 2)
            assert (await client.pair(CALL)).decode.worker_id == "d0"

    with_router(kubeconfig, scenario)


def test_workers_may_announce_themselves_and_report_blocks_but_only_pods_are_found(kubeconfig: Path) -> None:
    """Without Redis the locality index is the router's: block reports must go on, whoever finds the workers."""

    async def scenario(fake: KubeFake, router: RouterProcess, client: RouterClient) -> None:
        stranger = StubWorker(status("stranger", Role.DECODE))
        async with serving_worker(StubWorker(status("d0", Role.DECODE))) as server, serving_worker(stranger) as other:
            announced = [record("d0", address=server.address), record("stranger", address=other.address)]
            for one in announced:
                known = await client.register(Registration(one))
            assert list(known) == announced
            put_worker(fake, "d0", server.address)
            await paired(client)
            hashes = ChainHasher().hashes(Chain("weights", 16, frozenset()).root(UNSCOPED), CALL.token_ids, 16)
            await client.replace("d0", 1, hashes, 0)
            assert (await paired(client)).decode_cached_blocks == 3
            assert stranger.num_watchers == 0
            await client.unregister(announced[0])

    with_router(kubeconfig, scenario)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"discovery": "redis"}, "needs the URL of a Redis"),
        ({"discovery": "announce", "redis": "redis://127.0.0.1:1"}, "use redis or auto"),
        ({"discovery": "kubernetes"}, "name a kubeconfig by KUBECONFIG"),
    ],
)
def test_a_choice_that_cannot_work_is_refused(kubeconfig: Path, fields: dict[str, str], said: str) -> None:
    async def scenario() -> None:
        with pytest.raises(ConfigurationError, match=said):
            async with serving_router(router_settings(**fields)):
                raise AssertionError("it should not have started")

    asyncio.run(scenario())


def test_by_default_nothing_has_changed() -> None:
    assert router_settings().found_by == "announce"
    assert router_settings(redis="redis://h:1").found_by == "redis"
    assert router_settings(discovery="kubernetes", redis="redis://h:1").found_by == "kubernetes"


def test_no_kubernetes_is_imported_unless_it_is_chosen() -> None:
    code = "import sys, tandem.router.process; sys.exit('kubernetes' in sys.modules or 'aiohttp' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
