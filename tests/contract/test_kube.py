"""Contract of the Kubernetes client, against the in-repo API server and, where there is one, a real control plane.

The real one is found by TANDEM_KUBE_BIN, the folder of kube-apiserver; `make e2e-kubernetes` sets it.
"""

import asyncio
import contextlib
import dataclasses
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from pathlib import Path

import pytest

from tandem.kube.api import KubeApi, open_api
from tandem.kube.candidate import LeaseTerms
from tandem.kube.errors import (
    ConflictError,
    ExpiredError,
    ForbiddenError,
    KubeError,
    KubeUnavailableError,
    NotFoundError,
    UnauthorizedError,
)
from tandem.kube.leader import LeaderElection
from tandem.kube.lease import Lease
from tandem.kube.pod import PodEvent
from tandem.kube.pod_watch import PodWatch, WatchTerms
from tandem.process.discovery_kubernetes import KubernetesDiscovery
from tests.helpers.kube_fake.backends import Backend, fake_backend, real_backend
from tests.helpers.kube_fake.gate import Gate, gate_before
from tests.helpers.kube_fake.rules import Rule
from tools.kubernetes.binaries import VARIABLE, missing_binaries
from tools.kubernetes.control_plane import ControlPlane, running_control_plane

PATIENT_S = 20.0
ROLE = {"tandem.dev/role": "decode"}
SELECTOR = "tandem.dev/role"
QUICK = WatchTerms(watch_s=20, relist_s=600, first_backoff_s=0.05, max_backoff_s=0.2)

Scenario = Callable[[Backend], Coroutine[None, None, None]]
Run = Callable[[Scenario], None]


@pytest.fixture(scope="session")
def plane() -> Iterator[ControlPlane]:
    folder = Path(os.environ[VARIABLE])
    assert not missing_binaries(folder), f"{VARIABLE}={folder} has no {', '.join(missing_binaries(folder))}"
    with running_control_plane(folder) as running:
        yield running


@pytest.fixture(params=["fake", "real"] if os.environ.get(VARIABLE) else ["fake"])
def run(request: pytest.FixtureRequest) -> Run:
    def run_it(scenario: Scenario) -> None:
        async def main() -> None:
            real = request.param == "real"
            opening = real_backend(request.getfixturevalue("plane")) if real else fake_backend()
            async with opening as backend:
                await scenario(backend)

        asyncio.run(main())

    return run_it


@contextlib.asynccontextmanager
async def opened(
    backend: Backend, *, port: int | None = None, token: str | None = None, timeout_s: float = PATIENT_S
) -> AsyncIterator[KubeApi]:
    api = open_api(backend.access(port=port, token=token), backend.namespace, timeout_s=timeout_s)
    try:
        yield api
    finally:
        await api.close()


@contextlib.asynccontextmanager
async def gated(backend: Backend, *, timeout_s: float = PATIENT_S) -> AsyncIterator[tuple[KubeApi, Gate]]:
    """Through a gate that can be shut."""
    async with contextlib.AsyncExitStack() as stack:
        gate = await stack.enter_async_context(gate_before("127.0.0.1", backend.port))
        yield await stack.enter_async_context(opened(backend, port=gate.port, timeout_s=timeout_s)), gate


@contextlib.asynccontextmanager
async def going_on(work: Coroutine[None, None, None]) -> AsyncIterator[None]:
    task = asyncio.create_task(work)
    try:
        yield
        assert not task.done(), "it must not end by itself"
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def eventually(holds: Callable[[], Awaitable[object] | object]) -> None:
    async with asyncio.timeout(PATIENT_S):
        while True:
            found = holds()
            if await found if isinstance(found, Awaitable) else found:
                return
            await asyncio.sleep(0.01)


async def names(api: KubeApi, selector: str) -> list[str]:
    return sorted(pod.name for pod in (await api.list_pods(selector)).pods)


# --- pods


def test_pods_are_found_by_their_labels(run: Run) -> None:
    async def scenario(backend: Backend) -> None:
        await backend.put_pod("p0", {"tandem.dev/role": "prefill", "v": "1"}, ip="10.0.0.1", is_ready=True)
        await backend.put_pod("d0", {"tandem.dev/role": "decode", "v": "1"})
        await backend.put_pod("d1", {"tandem.dev/role": "decode"})
        await backend.put_pod("other", {"app": "redis"})
        async with opened(backend) as api:
            assert await names(api, SELECTOR) == ["d0", "d1", "p0"]
            assert await names(api, "tandem.dev/role=decode,v=1") == ["d0"]
            assert await names(api, "tandem.dev/role in (decode, prefill),!v") == ["d1"]
            assert await names(api, "v!=1") == ["d1", "other"]
            assert await names(api, "tandem.dev/role notin (decode)") == ["other", "p0"]
            found = {pod.name: pod for pod in (await api.list_pods(SELECTOR)).pods}
            assert (found["p0"].ip, found["p0"].ready, found["p0"].ports) == ("10.0.0.1", True, {"grpc": 7900})
            assert (found["d0"].ip, found["d0"].ready, found["d0"].ready_s) == ("", False, None)
            created_s, ready_s = found["p0"].created_s, found["p0"].ready_s
            assert created_s is not None
            assert ready_s is not None
            assert created_s <= ready_s + 1 <= time.time() + 2

    run(scenario)


def test_long_lists_come_in_pages(run: Run) -> None:
    async def scenario(backend: Backend) -> None:
        for number in range(5):
            await backend.put_pod(f"d{number}", ROLE)
        async with opened(backend) as api:
            small = KubeApi(api._wire, backend.namespace, page=2)
            assert await names(small, SELECTOR) == [f"d{number}" for number in range(5)]

    run(scenario)


def test_a_watch_goes_on_where_the_list_ended(run: Run) -> None:
    """Also when the first changes came between the two."""

    async def scenario(backend: Backend) -> None:
        await backend.put_pod("d0", ROLE)
        async with opened(backend) as api:
            listed = await api.list_pods(SELECTOR)
            await backend.put_pod("d1", ROLE)
            await backend.put_pod("unseen", {"app": "redis"})
            seen: list[PodEvent] = []
            async with contextlib.aclosing(api.watch_pods(SELECTOR, listed.resource_version, 60)) as events:
                seen.append(await anext(events))
                await backend.delete_pod("d0", grace_s=0)
                while seen[-1].kind != "deleted":
                    seen.append(await anext(events))
            told = [(event.kind, event.pod and event.pod.name) for event in seen]
            assert (told[0], told[-1]) == (("added", "d1"), ("deleted", "d0"))
            assert set(told[1:-1]) <= {("modified", "d1"), ("modified", "d0")}
            versions = [int(event.resource_version) for event in seen]
            assert versions == sorted(versions)
            assert versions[0] > int(listed.resource_version)

    run(scenario)


def test_a_pod_that_loses_its_label_is_gone_for_the_watch(run: Run) -> None:
    async def scenario(backend: Backend) -> None:
        await backend.put_pod("d0", ROLE)
        async with opened(backend) as api:
            listed = await api.list_pods(SELECTOR)
            selector = "tandem.dev/role=decode"
            async with contextlib.aclosing(api.watch_pods(selector, listed.resource_version, 60)) as events:
                await backend.put_pod("d0", {"tandem.dev/role": "prefill"})
                event = await anext(events)
                while event.kind == "modified":
                    event = await anext(events)
                assert (event.kind, event.pod and event.pod.name) == ("deleted", "d0")

    run(scenario)


def test_a_watch_ends_in_time_and_the_next_goes_on(run: Run) -> None:
    """From a bookmark, when there was one: no server promises them."""

    async def scenario(backend: Backend) -> None:
        await backend.put_pod("d0", ROLE)
        async with opened(backend) as api:
            listed = await api.list_pods(SELECTOR)
            for number in range(3):
                await backend.put_pod(f"unseen{number}")
            seen = [event async for event in api.watch_pods(SELECTOR, listed.resource_version, backend.bookmark_s)]
            assert all(event.kind == "bookmark" for event in seen)
            assert all(int(event.resource_version) > int(listed.resource_version) for event in seen)
            await backend.put_pod("d1", ROLE)
            last = seen[-1].resource_version if seen else listed.resource_version
            watch = api.watch_pods(SELECTOR, last, 60)
            async with contextlib.aclosing(watch) as events:
                first = await anext(events)
                assert first.pod is not None
                assert first.pod.name == "d1"

    run(scenario)


def test_a_version_that_is_too_old_is_said(run: Run) -> None:
    async def scenario(backend: Backend) -> None:
        async with opened(backend) as api:
            listed = await api.list_pods(SELECTOR)
            await backend.put_pod("d0", ROLE)
            await backend.forget()
            with pytest.raises(ExpiredError, match="watch pods in namespace"):
                async for _ in api.watch_pods(SELECTOR, listed.resource_version, 60):
                    pass
            assert await names(api, SELECTOR) == ["d0"]

    run(scenario)


def test_a_watch_that_breaks_says_so(run: Run) -> None:
    async def scenario(backend: Backend) -> None:
        await backend.put_pod("d0", ROLE)
        async with gated(backend) as (api, gate):
            listed = await api.list_pods(SELECTOR)
            await backend.put_pod("d1", ROLE)
            async with contextlib.aclosing(api.watch_pods(SELECTOR, listed.resource_version, 60)) as events:
                await anext(events)
                await gate.cut()
                with pytest.raises(KubeUnavailableError):
                    async for _ in events:
                        pass

    run(scenario)


# --- the server away and slow


def test_a_server_that_is_away_is_said_and_used_again(run: Run) -> None:
    async def scenario(backend: Backend) -> None:
        await backend.put_pod("d0", ROLE)
        async with gated(backend) as (api, gate):
            assert await names(api, SELECTOR) == ["d0"]
            await gate.refuse()
            with pytest.raises(KubeUnavailableError, match=r"list pods in namespace.*try again later"):
                await api.list_pods(SELECTOR)
            await gate.listen()
            assert await names(api, SELECTOR) == ["d0"]

    run(scenario)


def test_a_slow_server_is_given_up_in_time_and_waits_can_be_cancelled(run: Run) -> None:
    async def scenario(backend: Backend) -> None:
        async with gated(backend, timeout_s=0.5) as (api, gate):
            gate.hold()
            started_s = time.monotonic()
            with pytest.raises(KubeUnavailableError, match=r"within 0\.5 s"):
                await api.list_pods(SELECTOR)
            with pytest.raises(KubeUnavailableError, match=r"within 0\.5 s"):
                async for _ in api.watch_pods(SELECTOR, "1", 60):
                    pass
            assert 1.0 <= time.monotonic() - started_s < 5
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(api.read_lease("x"), 0.05)
            gate.let_go()
            await eventually(lambda: _answers(api))

    run(scenario)


async def _answers(api: KubeApi) -> bool:
    try:
        await api.list_pods(SELECTOR)
    except KubeUnavailableError:
        return False
    return True


def test_what_is_kept_is_true_again_after_an_outage(run: Run) -> None:
    async def scenario(backend: Backend) -> None:
        await backend.put_pod("d0", ROLE)
        await backend.put_pod("d1", ROLE)
        async with gated(backend) as (api, gate):
            watch = PodWatch(api, SELECTOR, QUICK)
            async with going_on(watch.run()):
                await eventually(lambda: len(watch.pods) == 2)
                await gate.refuse()
                await eventually(lambda: watch.failure is not None)
                await backend.delete_pod("d0", grace_s=0)
                await backend.put_pod("d2", ROLE, ip="10.0.0.2")
                assert [pod.name for pod in watch.pods] == ["d0", "d1"]
                await gate.listen()
                await eventually(lambda: watch.failure is None)
                assert {pod.name: pod.ip for pod in watch.pods} == {"d1": "", "d2": "10.0.0.2"}
                await backend.put_pod("d1", ROLE, ip="10.0.0.1")
                await eventually(lambda: {pod.ip for pod in watch.pods} == {"10.0.0.1", "10.0.0.2"})

    run(scenario)


def test_workers_are_the_pods_that_are_ready_and_stay(run: Run) -> None:
    async def scenario(backend: Backend) -> None:
        await backend.put_pod("d0", ROLE, ip="10.0.0.1", is_ready=True)
        await backend.put_pod("d1", ROLE, ip="10.0.0.2", node="nowhere")
        discovery = KubernetesDiscovery(open_api(backend.access(), backend.namespace), SELECTOR, QUICK)

        async def addresses() -> list[str]:
            return sorted(record.worker.address for record in await discovery.workers())

        async def they_are(*wanted: str) -> bool:
            return await addresses() == list(wanted)

        assert await addresses() == ["10.0.0.1:7900"]
        await backend.put_pod("d1", ROLE, ip="10.0.0.2", node="nowhere", is_ready=True)
        await eventually(lambda: they_are("10.0.0.1:7900", "10.0.0.2:7900"))
        await backend.put_pod("d0", ROLE, ip="10.0.0.1", is_ready=False)
        await eventually(lambda: they_are("10.0.0.2:7900"))
        await backend.delete_pod("d1", grace_s=30)
        await eventually(lambda: they_are())
        await discovery.close()

    run(scenario)


# --- scale


def test_replicas_are_read_and_written(run: Run) -> None:
    async def scenario(backend: Backend) -> None:
        await backend.put_deployment("decode", 2)
        async with opened(backend) as api:
            scale = await api.read_scale("decode")
            assert (scale.name, scale.num_wanted) == ("decode", 2)
            assert (await api.write_scale("decode", 3)).num_wanted == 3
            assert (await api.write_scale("decode", 0)).num_wanted == 0
            assert (await api.read_scale("decode")).num_wanted == 0

    run(scenario)


def test_a_scale_that_somebody_else_changed_is_not_overwritten(run: Run) -> None:
    async def scenario(backend: Backend) -> None:
        await backend.put_deployment("decode", 2)
        async with opened(backend) as api:
            seen = await api.read_scale("decode")
            await api.write_scale("decode", 5)
            with pytest.raises(ConflictError, match="patch deployments/scale 'decode'"):
                await api.write_scale("decode", 1, seen.resource_version)
            assert (await api.read_scale("decode")).num_wanted == 5

    run(scenario)


def test_a_deployment_that_is_not_there_is_named(run: Run) -> None:
    async def scenario(backend: Backend) -> None:
        async with opened(backend) as api:
            for call in (api.read_scale("ghost"), api.write_scale("ghost", 1)):
                with pytest.raises(NotFoundError, match="deployments/scale 'ghost' in namespace"):
                    await call

    run(scenario)


# --- leases


def test_a_lease_is_replaced_only_by_whoever_saw_it_last(run: Run) -> None:
    async def scenario(backend: Backend) -> None:
        async with opened(backend) as api:
            with pytest.raises(NotFoundError):
                await api.read_lease("planner")
            wanted = Lease(name="planner", holder="a", duration_s=15, acquired_s=1e9 + 0.5, renewed_s=1e9 + 1)
            made = await api.create_lease(wanted)
            assert dataclasses.replace(made, resource_version="") == wanted
            with pytest.raises(ConflictError):
                await api.create_lease(wanted)
            assert await api.read_lease("planner") == made
            later = await api.replace_lease(dataclasses.replace(made, holder="b", num_transitions=1))
            with pytest.raises(ConflictError, match="update leases 'planner'"):
                await api.replace_lease(dataclasses.replace(made, holder="c"))
            freed = await api.replace_lease(dataclasses.replace(later, holder=""))
            assert freed.holder == ""

    run(scenario)


TERMS = LeaseTerms(lease_s=3, renew_deadline_s=1.5, retry_s=0.1)
LONG_TERMS = LeaseTerms(lease_s=60, renew_deadline_s=30, retry_s=0.1)


def test_two_candidates_have_one_leader_and_the_next_need_not_wait(run: Run) -> None:
    async def scenario(backend: Backend) -> None:
        async with opened(backend) as api, opened(backend) as other:
            first, second = (
                LeaderElection(one, "planner", name, LONG_TERMS) for one, name in ((api, "a"), (other, "b"))
            )
            async with going_on(second.run()):
                async with going_on(first.run()):
                    await eventually(lambda: first.is_leader or second.is_leader)
                    await asyncio.gather(first.round(), second.round())
                    assert first.is_leader != second.is_leader
                    assert first.holder == second.holder
                assert not first.is_leader
                started_s = time.monotonic()
                await eventually(lambda: second.is_leader)
                assert time.monotonic() - started_s < LONG_TERMS.lease_s / 2

    run(scenario)


def test_a_leader_that_is_cut_off_stops_before_another_begins(run: Run) -> None:
    async def scenario(backend: Backend) -> None:
        async with gated(backend) as (cut_off, gate), opened(backend) as api:
            first, second = LeaderElection(cut_off, "planner", "a", TERMS), LeaderElection(api, "planner", "b", TERMS)
            async with going_on(first.run()):
                await eventually(lambda: first.is_leader)
                async with going_on(second.run()):
                    gate.hold()
                    await eventually(lambda: not first.is_leader)
                    assert not second.is_leader
                    await eventually(lambda: second.is_leader)
                    assert not first.is_leader
                    gate.let_go()
                    await eventually(lambda: first.holder == "b")
                    assert not first.is_leader
                    assert (await api.read_lease("planner")).num_transitions == 1

    run(scenario)


# --- what is not allowed


def test_a_missing_rule_is_named(run: Run) -> None:
    async def scenario(backend: Backend) -> None:
        await backend.put_deployment("decode", 1)
        token = await backend.allow([Rule("apps", "deployments/scale", ("get",), ("decode",))])
        async with opened(backend, token=token) as api:
            await eventually(lambda: _is_allowed(api.read_scale("decode")))
            refused: list[tuple[Coroutine[None, None, object], str]] = [
                (api.write_scale("decode", 2), r"deployments/scale.*\['apps'\].*'decode'.*verbs: \[patch\]"),
                (api.read_scale("prefill"), r"get deployments/scale 'prefill'.*\['apps'\]"),
                (api.list_pods(SELECTOR), r"list pods.*apiGroups: \[''\].*verbs: \[get, list, watch\]"),
                (api.read_lease("planner"), r"get leases 'planner'.*\['coordination.k8s.io'\]"),
            ]
            for call, said in refused:
                with pytest.raises(ForbiddenError, match=said):
                    await call
            with pytest.raises(ForbiddenError, match="watch pods"):
                async for _ in api.watch_pods(SELECTOR, "1", 60):
                    pass

    run(scenario)


async def _is_allowed(call: Coroutine[None, None, object]) -> bool:
    try:
        await call
    except ForbiddenError:
        return False
    return True


def test_a_stranger_is_told_to_check_the_token(run: Run) -> None:
    async def scenario(backend: Backend) -> None:
        for token in ("stranger", ""):
            async with opened(backend, token=token) as api:
                with pytest.raises(UnauthorizedError, match="check the token"):
                    await api.list_pods(SELECTOR)

    run(scenario)


def test_every_failure_is_one_of_ours(run: Run) -> None:
    async def scenario(backend: Backend) -> None:
        async with opened(backend) as api:
            with pytest.raises(KubeError, match="list pods"):
                await api.list_pods("(")

    run(scenario)
