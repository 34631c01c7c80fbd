"""Against the in-repo API server over real HTTP."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest

from tandem.core.errors import UnavailableError
from tandem.kube.api import KubeApi, open_api
from tandem.kube.errors import ForbiddenError, NotFoundError
from tandem.planner_service.kubernetes import GatewayPods, KubernetesTargets, PoolName
from tandem.planner_service.targets import Pool, PoolReplicas
from tests.helpers.kube_fake import KubeFake, Rule, running_fake

P, D = Pool.PREFILL, Pool.DECODE
NAMES = {P: PoolName("tandem-prefill", "role=prefill"), D: PoolName("tandem-decode")}


@contextlib.asynccontextmanager
async def cluster(token: str = "") -> AsyncIterator[tuple[KubeFake, KubeApi]]:
    async with running_fake() as fake:
        fake.put_deployment("tandem-prefill", 3)
        fake.put_deployment("tandem-decode", 2)
        api = open_api(fake.access(token), "default")
        try:
            yield fake, api
        finally:
            await api.close()


def test_replicas_are_those_asked_for_and_the_pods_that_are_there() -> None:
    async def story() -> None:
        async with cluster() as (fake, api):
            labels = {"role": "prefill"}
            fake.put_pod("p-ready", ip="10.0.0.1", labels=labels, node="n")
            fake.put_pod("p-starting", labels=labels, ready=False)
            fake.put_pod("p-ending", ip="10.0.0.2", labels=labels, node="n")
            fake.end_pod("p-ending")
            fake.put_pod("other", ip="10.0.0.3", labels={"role": "decode"})
            targets = KubernetesTargets(api, NAMES)
            prefill, decode = await targets.read(P), await targets.read(D)
            assert (prefill.num_wanted, decode.num_wanted, decode.replicas) == (3, 2, None)
            assert prefill.replicas is not None
            assert {one.name: one.ready_s is not None for one in prefill.replicas} == {
                "p-ready": True,
                "p-starting": False,
            }
            assert all(one.created_s > 1e9 for one in prefill.replicas)

    asyncio.run(story())


def test_replicas_are_written_through_the_scale() -> None:
    async def story() -> None:
        async with cluster() as (fake, api):
            targets = KubernetesTargets(api, NAMES)
            await targets.write(D, 6, await targets.read(D))
            assert (fake.num_replicas("tandem-decode"), fake.num_replicas("tandem-prefill")) == (6, 3)
            assert not [call for call in fake.calls if call.split()[0] in ("patch", "update") and "scale" not in call]

    asyncio.run(story())


def test_what_somebody_else_has_written_meanwhile_is_not_overwritten() -> None:
    async def story() -> None:
        async with cluster() as (fake, api):
            targets = KubernetesTargets(api, NAMES)
            seen = await targets.read(D)
            await api.write_scale("tandem-decode", 9)
            with pytest.raises(UnavailableError, match="was scaled from 2 to 9 by somebody else"):
                await targets.write(D, 6, seen)
            assert fake.num_replicas("tandem-decode") == 9

    asyncio.run(story())


def test_a_missing_rule_or_deployment_is_named() -> None:
    async def story() -> None:
        async with cluster("planner") as (fake, api):
            fake.rules.grant("planner", [Rule("apps", "deployments/scale", ("get",))])
            targets = KubernetesTargets(api, {P: PoolName("nothing"), D: PoolName("tandem-decode")})
            with pytest.raises(NotFoundError, match="nothing"):
                await targets.read(P)
            with pytest.raises(ForbiddenError, match="patch"):
                await targets.write(D, 6, PoolReplicas(num_wanted=2))

    asyncio.run(story())


def test_gateways_are_the_ready_pods_of_a_label() -> None:
    async def story() -> None:
        async with cluster() as (fake, api):
            pods = GatewayPods(api, "component=gateway")
            with pytest.raises(UnavailableError, match="is it the gateways' label selector"):
                await pods.find()
            labels = {"component": "gateway"}
            fake.put_pod("g-0", ip="10.0.0.1", labels=labels, ports={"http": 8000})
            fake.put_pod("g-1", ip="fd00::5", labels=labels, ports={"http": 8000, "metrics": 8001})
            fake.put_pod("g-2", ip="10.0.0.3", labels=labels, ready=False)
            assert await pods.find() == ["10.0.0.1:8000", "[fd00::5]:8001"]
            fake.put_pod("g-3", ip="10.0.0.4", labels=labels, ports={"web": 80})
            with pytest.raises(UnavailableError, match="g-3 has no container port named metrics"):
                await pods.find()

    asyncio.run(story())
