"""A whole planner in this process: real HTTP to gateways' counters and to an API server, real gRPC to a router.

Only the policy is a script, and workers only report.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import httpx
import pytest

from tandem.core.errors import ConfigurationError
from tandem.kube.api import open_api
from tandem.planner_service.actuator import ScalingOutcome
from tandem.planner_service.process import Planner, lease_terms, running_planner, write_timeout_s
from tandem.planner_service.settings import PlannerSettings
from tandem.planning.observation import Observation, Plan
from tests.helpers.kube_fake import KubeFake, Rule, running_fake
from tests.helpers.secret import SECRET
from tests.unit.planner_service.builders import plan
from tests.unit.planner_service.fleets import decode, prefill, stub_fleet
from tests.unit.planner_service.gateways import FakeGateway, serving
from tests.unit.process.stub_workers import eventually

TOKEN = "planner"
SCALES = ("tandem-prefill", "tandem-decode")
RULES = {
    "pods": Rule("", "pods", ("get", "list", "watch")),
    "scales": Rule("apps", "deployments/scale", ("get", "patch"), SCALES),
    "new lease": Rule("coordination.k8s.io", "leases", ("create",)),
    "lease": Rule("coordination.k8s.io", "leases", ("get", "update"), ("tandem-planner",)),
}


class Script:
    """A policy that wants what it is told to."""

    def __init__(self) -> None:
        self.wanted = (1, 1)
        self.seen: list[Observation] = []

    def plan(self, observation: Observation) -> Plan:
        self.seen.append(observation)
        return plan(*self.wanted)


@dataclass
class Scene:
    """Everything around planners. `grant` gives the planner's account all but the rules named."""

    fake: KubeFake
    gateway: FakeGateway
    settings: Callable[..., PlannerSettings]

    def grant(self, *, without: tuple[str, ...] = ()) -> None:
        self.fake.rules.grant(TOKEN, [rule for name, rule in RULES.items() if name not in without])

    def num_replicas(self) -> tuple[int, int]:
        prefill, decode = (self.fake.num_replicas(name) for name in SCALES)
        return prefill, decode

    @contextlib.asynccontextmanager
    async def planner(self, script: Script, **fields: object) -> AsyncIterator[Planner]:
        settings = self.settings(**fields)
        api = open_api(self.fake.access(TOKEN), settings.kubernetes_namespace or "")
        async with contextlib.AsyncExitStack() as opened:
            opened.push_async_callback(api.close)
            planner = await opened.enter_async_context(running_planner(settings, script, api))
            yield planner
            for task in planner.tasks:
                assert not task.done(), "it must not end by itself"


@contextlib.asynccontextmanager
async def scene() -> AsyncIterator[Scene]:
    """Two pools of one worker each, whose Deployments and pods are there."""
    gateway = FakeGateway()
    async with running_fake() as fake, serving(gateway) as server, stub_fleet(prefill(), decode()) as fleet:
        for name, role in zip(SCALES, ("prefill", "decode"), strict=True):
            fake.put_deployment(name, 1)
            fake.put_pod(f"{name}-0", ip="10.0.0.1", labels={"role": role}, node="n")
        labels = {"component": "gateway"}
        fake.put_pod("gateway-0", ip="127.0.0.1", labels=labels, ports={"http": server.port}, node="n")

        def settings(**fields: object) -> PlannerSettings:
            given = {
                "mode": "act",
                "interval_s": 0.2,
                "routers": fleet.router,
                "gateway_selector": "component=gateway",
                "prefill_deployment": "tandem-prefill",
                "decode_deployment": "tandem-decode",
                "prefill_selector": "role=prefill",
                "decode_selector": "role=decode",
                "lease_s": 3.0,
                "metrics_port": 0,
                "cluster_secret": SECRET.decode(),
            }
            return PlannerSettings.model_validate({**given, **fields})

        found = Scene(fake, gateway, settings)
        found.grant()
        yield found


def outcomes(planner: Planner) -> tuple[ScalingOutcome, ...]:
    last = planner.loop.last
    return () if last is None else tuple(action.outcome for action in last.actions)


def note(planner: Planner, number: int = 1) -> str:
    last = planner.loop.last
    return "" if last is None else last.actions[number].note


def test_a_leader_scales_with_no_more_rights_than_it_needs() -> None:
    async def story() -> None:
        async with scene() as found:
            script = Script()
            async with found.planner(script) as planner:
                await eventually(lambda: outcomes(planner) == ("unchanged", "unchanged"))
                script.wanted = (2, 4)
                await eventually(lambda: found.num_replicas() == (2, 4))
                await eventually(lambda: script.seen[-1].decode.num_wanted == 4)
                assert len(script.seen[-1].decode.starting_s) == 3
                script.wanted = (1, 1)
                await eventually(lambda: found.num_replicas() == (1, 1))
                async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{planner.metrics_port}") as client:
                    assert (await client.get("/plan")).json()["is_leader"]
                    assert (await client.get("/health")).status_code == 200
                    assert "tandem_planner_leader 1.0" in (await client.get("/metrics")).text
                    assert (await client.get("/live")).status_code == 200
                assert found.fake.holder("tandem-planner")
            assert found.fake.holder("tandem-planner") == "", "the next one would wait for the lease to end"

    asyncio.run(story())


def test_advice_asks_for_no_lease_and_writes_nothing() -> None:
    async def story() -> None:
        async with scene() as found:
            found.grant(without=("lease", "new lease"))
            script = Script()
            script.wanted = (3, 1)
            async with found.planner(script, mode="advise") as planner:
                await eventually(lambda: outcomes(planner) == ("advised", "unchanged"))
            assert found.num_replicas() == (1, 1)
            assert not [call for call in found.fake.calls if "lease" in call or call.startswith("patch")]

    asyncio.run(story())


def test_of_two_planners_one_acts_and_the_other_takes_over() -> None:
    async def story() -> None:
        async with scene() as found, contextlib.AsyncExitStack() as first:
            one, other = Script(), Script()
            one.wanted, other.wanted = (2, 2), (5, 5)
            leader = await first.enter_async_context(found.planner(one))
            await eventually(lambda: found.num_replicas() == (2, 2))
            async with found.planner(other) as follower:
                await eventually(lambda: outcomes(follower) == ("following", "following"))
                assert leader.leadership.is_leader
                assert found.num_replicas() == (2, 2)
                await first.aclose()
                await eventually(lambda: found.num_replicas() == (5, 5))

    asyncio.run(story())


def test_who_loses_the_lease_stops_acting() -> None:
    async def story() -> None:
        async with scene() as found:
            script = Script()
            async with found.planner(script) as planner:
                await eventually(lambda: outcomes(planner) == ("unchanged", "unchanged"))
                found.grant(without=("lease",))
                await eventually(lambda: outcomes(planner) == ("following", "following"))
                script.wanted = (4, 4)
                count = len(script.seen)
                await eventually(lambda: len(script.seen) > count + 3)
                assert found.num_replicas() == (1, 1)
                found.grant()
                await eventually(lambda: found.num_replicas() == (4, 4))

    asyncio.run(story())


def test_a_right_that_is_missing_is_named_and_the_other_pool_is_scaled() -> None:
    async def story() -> None:
        async with scene() as found:
            rules = [*RULES.values(), Rule("apps", "deployments/scale", ("get",), ("tandem-decode",))]
            rules[1] = Rule("apps", "deployments/scale", ("get", "patch"), ("tandem-prefill",))
            found.fake.rules.grant(TOKEN, rules)
            script = Script()
            script.wanted = (3, 3)
            async with found.planner(script) as planner:
                await eventually(lambda: outcomes(planner) == ("unchanged", "refused"))
                assert found.num_replicas() == (3, 1)
                assert "deployments/scale" in note(planner)
                assert "patch" in note(planner)
                assert "tandem-decode" in note(planner)

    asyncio.run(story())


def test_an_api_server_that_is_away_is_waited_for() -> None:
    async def story() -> None:
        async with scene() as found:
            script = Script()
            async with found.planner(script, gateway_selector="", gateways=gateway_of(found)) as planner:
                await eventually(lambda: outcomes(planner) == ("unchanged", "unchanged"))
                await found.fake.stop()
                script.wanted = (2, 2)
                await eventually(lambda: outcomes(planner) == ("away", "away"))
                observed = planner.loop.observed
                assert observed is not None
                assert any("deployments/scale" in problem for problem in observed.problems)
                await found.fake.start()
                await eventually(lambda: found.num_replicas() == (2, 2))

    asyncio.run(story())


def test_nothing_shrinks_while_a_gateway_does_not_answer() -> None:
    async def story() -> None:
        async with scene() as found:
            script = Script()
            script.wanted = (3, 3)
            async with found.planner(script) as planner:
                await eventually(lambda: found.num_replicas() == (3, 3))
                labels = {"component": "gateway"}
                found.fake.put_pod("gateway-1", ip="127.0.0.1", labels=labels, ports={"http": 9}, node="n")
                script.wanted = (1, 4)
                await eventually(lambda: outcomes(planner)[:1] == ("blind",))
                await eventually(lambda: found.num_replicas() == (3, 4))
                assert "127.0.0.1:9" in note(planner, 0)

    asyncio.run(story())


@pytest.mark.parametrize("lease_s", [3.0, 15.0, 600.0])
def test_a_write_ends_before_another_may_lead(lease_s: float) -> None:
    settings = PlannerSettings.model_validate({"gateways": "127.0.0.1:8000", "lease_s": lease_s})
    assert 0 < write_timeout_s(settings) <= 5.0
    assert lease_terms(settings).lease_s == lease_s
    assert lease_terms(settings).renew_deadline_s + write_timeout_s(settings) < lease_s


def test_a_port_that_is_taken_is_said_and_nothing_is_left_open() -> None:
    async def story() -> None:
        async with scene() as found, found.planner(Script()) as planner:
            with pytest.raises(ConfigurationError, match="metrics cannot be served"):
                async with found.planner(Script(), metrics_port=planner.metrics_port):
                    pass

    asyncio.run(story())


def gateway_of(found: Scene) -> str:
    (address,) = (
        f"127.0.0.1:{pod['spec']['containers'][0]['ports'][0]['containerPort']}"
        for pod in found.fake.store.list("pods", "default")
        if pod["metadata"]["name"] == "gateway-0"
    )
    return address
