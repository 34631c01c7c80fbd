"""World of one run: starts a scenario's processes, injects its faults and sends its clients' requests."""

import asyncio
import random
import tempfile
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import Any

from tandem.accounts.key import PREFIX, AccountKey, digest_of
from tandem.core.errors import ConfigurationError, EngineStoppedError
from tandem.engine.engine import Engine
from tandem.planner_service.process import Planner
from tandem.routing.snapshot import Role
from tandem.rpc.network import current_network
from tandem.rpc.prompt_reuse import PromptSizes, current_prompt_sizes
from tandem.simulation.assembly import WorkerSizes
from tandem.simulation.client import ClientOutcome, Exchange
from tandem.simulation.disk import SimulatedDisk
from tandem.simulation.executor import StepCost
from tandem.simulation.fabric import EventTrace, Fabric, NetworkConditions
from tandem.simulation.fault import RANK_FAULTS, Fault, FaultInterval, FaultKind
from tandem.simulation.kubernetes import KUBERNETES, SimulatedKubernetes
from tandem.simulation.loop import VirtualLoop
from tandem.simulation.network import SimulatedNetwork
from tandem.simulation.node import Node
from tandem.simulation.planners import METRICS_PORT, born_now, planner_settings, serving_simulated_planner
from tandem.simulation.previous_release import NEXT_SPOKEN, PREVIOUS_SPOKEN
from tandem.simulation.processes import (
    TRUST,
    SimulatedEnvironment,
    SimulatedGateway,
    SimulatedWorker,
    for_ever,
    serving_simulated_router,
    serving_simulated_worker,
    start_simulated_gateway,
)
from tandem.simulation.ranks import SimulatedRankSystem
from tandem.simulation.redis import REDIS_ADDRESS, STORE, SimulatedRedis
from tandem.simulation.redis_accounts import add_keys
from tandem.simulation.scaling import Scaling, ScalingInvariants
from tandem.simulation.scenario import TENANTS, WARM_UP_S, ClientRequest, Scenario
from tandem.simulation.streams import StreamListener, Streams

PATIENCE_S = 75.0  # after the last fault is over and the last request was made; past it a request waits for ever
EPSILON_S = 2.5  # allowed beyond a time limit
_GRACE_S = 10.0  # in which a worker that is told to end may drain
_SUPERVISED_S = 0.5  # until a worker whose group could not be formed is started again
_SHORT_PROMPTS = PromptSizes(min_tokens=24, least_shared=16, sample=8, lengths=(16, 32, 64, 128), max_bytes=6000)


class World:
    """State of one run, and its processes. `begin_fault`: begins a fault of the scenario and schedules its end.
    `on_outcome`: called with each request's outcome. `on_violation`: called after each violation.
    """

    def __init__(
        self, scenario: Scenario, begin_fault: Callable[["World", Fault], None], *, keep_trace: bool = False
    ) -> None:
        self.scenario = scenario
        self._begin_fault = begin_fault
        seed = str(scenario.seed)
        self.loop = VirtualLoop(seed)
        self.trace = EventTrace(keep_trace)
        conditions = NetworkConditions(
            scenario.conditions.mean_s, scenario.conditions.slow_share, scenario.conditions.slow_s
        )
        self.fabric = Fabric(self.loop, random.Random(f"{seed} fabric"), self.trace, conditions)
        self.network = SimulatedNetwork(self.fabric)
        store_node = Node(STORE, self.loop.time, random.Random(f"{seed} {STORE}"))
        self.loop.add(store_node)
        self.streams = Streams(self.fabric)
        self.loop.connect = self.streams.connect
        self.redis = SimulatedRedis(store_node.wall_s)
        add_keys(self.redis, [_key_of(owner) for owner in TENANTS])
        self.streams.listeners[REDIS_ADDRESS] = StreamListener(
            store_node, self.redis.session, lambda: not self.redis.is_down
        )
        self._place = tempfile.TemporaryDirectory()
        self.disks = {name: SimulatedDisk(Path(self._place.name) / name) for name in scenario.gateways}
        self.environment = SimulatedEnvironment(
            self.loop,
            self.fabric,
            self.streams,
            self.redis,
            [self.address_of(name) for name in scenario.routers],
            WorkerSizes(num_blocks=scenario.num_blocks, num_host_slots=scenario.num_host_slots),
            scenario.lease_ttl_s,
            scenario.account_lease_s,
            scenario.max_local_tokens,
            StepCost(scenario.step_s),
            scenario.is_open,
            scenario.uses_redis,
            disks=self.disks,
            widths=dict(scenario.ranks),
        )
        self.nodes: dict[str, Node] = {}
        self.workers: dict[str, SimulatedWorker] = {}
        self.gateways: dict[str, SimulatedGateway] = {}
        self.exchanges: list[Exchange] = []
        self.planners: dict[str, Planner] = {}
        self.kubernetes: SimulatedKubernetes | None = None
        self.scaling: ScalingInvariants | None = None
        self.crashed: dict[str, list[float]] = {}
        self.ending: set[str] = set()
        self.spans: list[FaultInterval] = []
        self.violations: list[str] = []
        self.on_outcome: Callable[[ClientOutcome], None] = lambda _: None
        self.on_violation: Callable[[], None] = lambda: None
        self._num_started = 0
        self._overdue: set[str] = set()  # workers that kept a lease for too long
        if scenario.scaling is not None:
            self._add_kubernetes(scenario.scaling)

    def _add_kubernetes(self, scaling: Scaling) -> None:
        node = Node(KUBERNETES, self.loop.time, random.Random(f"{self.scenario.seed} {KUBERNETES}"))
        self.loop.add(node)
        replicas = {"prefill": len(self.scenario.prefills), "decode": len(self.scenario.decodes)}
        self.kubernetes = SimulatedKubernetes(node, replicas, self.start, self._stop, scaling.startup_s)
        self.scaling = ScalingInvariants(self, self.kubernetes, scaling, self.scenario.gateways, self.scenario.planners)
        self.kubernetes.on_call, self.kubernetes.on_write = self.scaling.check_leaders, self.scaling.note

    def address_of(self, name: str) -> str:
        """Address of a process. NOTE: workers that planners have started are in no scenario."""
        names = self.scenario.names
        return f"{name}:{1000 + names.index(name) if name in names else 2000}"

    def close(self) -> None:
        """Removes the disks."""
        self._place.cleanup()

    def violate(self, what: str) -> None:
        """Record a violated invariant."""
        self.violations.append(f"{self.loop.time():.3f} s: {what}")
        self.on_violation()

    @property
    def rank_systems(self) -> list[SimulatedRankSystem]:
        """Rank systems of all workers with several ranks that were ever started."""
        return self.environment.all_rank_systems

    def was_well(self, name: str, since_s: float, until_s: float) -> bool:
        """Whether no fault concerned the process between these times. NOTE: a partition concerns both of its ends."""
        return not any(
            name in (span.name, span.other, "everybody") or span.name in ("everybody", STORE)
            for span in self.spans
            if span.from_s < until_s and (span.until_s is None or span.until_s > since_s)
        )

    def away_since_s(self, name: str) -> float | None:
        node = self.nodes.get(name)
        if node is not None and not node.is_paused:
            return None
        return max((span.from_s for span in self.spans if span.name == name and span.until_s is None), default=None)

    def leaders(self) -> list[str]:
        running = [name for name in self.planners if name in self.nodes and not self.nodes[name].is_paused]
        return [name for name in running if self.planners[name].leadership.is_leader]

    def was_well_since(self, name: str, since_s: float) -> bool:
        return self.was_well(name, since_s, self.loop.time())

    def observed_at_s(self, planner: str) -> float:
        observed = self.planners[planner].loop.observed
        return 0.0 if observed is None else observed.at_s - self.nodes[planner].wall_s() + self.loop.time()

    async def run(self) -> None:
        """Run the scenario from the first process to the last check."""
        loop = self.loop
        for name in self.scenario.names:
            self.start(name)
        for fault in self.scenario.faults:
            self.in_world(fault.at_s, self._begin_fault, self, fault)
        waiting = [loop.create_task(self._ask(ask), name=ask.request_id) for ask in self.scenario.asks]
        last_s = max([fault.at_s + fault.for_s for fault in self.scenario.faults] + [WARM_UP_S])
        last_s = max([last_s, *(ask.at_s for ask in self.scenario.asks)])
        if waiting:
            await asyncio.wait(waiting, timeout=last_s + PATIENCE_S - loop.time())
        await asyncio.sleep(max(0.0, last_s - loop.time()))
        await asyncio.sleep(max(self.scenario.lease_ttl_s, self.scenario.account_lease_s) + EPSILON_S)
        if self.scaling is not None:  # NOTE: by the loop's time, as planners look at the clock
            self.scaling.kubernetes.node.context.copy().run(self.scaling.check_rest)

    def start(self, name: str) -> None:
        """Start a process on a new node."""
        self._num_started += 1
        node = Node(name, self.loop.time, random.Random(f"{self.scenario.seed} {name} {self._num_started}"))
        node.is_previous_release = name in self.scenario.previous_release
        if self.scenario.previous_release:
            node.spoken = PREVIOUS_SPOKEN if node.is_previous_release else NEXT_SPOKEN
        node.context.run(current_network.set, self.network.of(node))
        if self.scenario.sends_prompt_suffixes:
            node.context.run(current_prompt_sizes.set, _SHORT_PROMPTS)
        self.loop.add(node)
        self.nodes[name] = node
        role = name.partition("-")[0]
        main = {
            "router": self._run_router,
            "prefill": self._run_worker,
            "decode": self._run_worker,
            "planner": self._run_planner,
        }.get(role, self._run_gateway)
        task = node.spawn(self.loop, main(name, node), name)
        task.add_done_callback(lambda _: self._note_end(name, node, task), context=self.loop.world.context)

    def kill(self, name: str, *, is_silent: bool) -> None:
        """End a process as SIGKILL does."""
        node = self.nodes.pop(name)
        self.crashed.setdefault(name, []).append(self.loop.time())
        self.workers.pop(name, None)
        self.planners.pop(name, None)
        if self.kubernetes is not None:
            self.kubernetes.note_ready(name, is_ready=False)
        if (ranks := self.environment.rank_systems.pop(name, None)) is not None:
            ranks.die(is_silent=is_silent)
        self.network.crash(node, is_silent=is_silent)
        self.loop.kill(node)
        if self.gateways.pop(name, None) is not None:
            for exchange in self.exchanges:
                if exchange.outcome.ask.gateway == name:
                    exchange.lose()

    async def _run_router(self, name: str, node: Node) -> None:
        await _hold(serving_simulated_router(self.environment, node, self.address_of(name)), lambda _: None)

    async def _run_worker(self, name: str, node: Node) -> None:
        role = Role.DECODE if name.startswith("decode") else Role.PREFILL
        serving = serving_simulated_worker(self.environment, node, role, name, self.address_of(name), self._note_turn)
        async with serving as simulated:
            self.workers[name] = simulated
            if self.kubernetes is not None:
                self.kubernetes.note_ready(name)
            await simulated.worker.lifecycle.until_drained()
            await simulated.worker.drain(_GRACE_S)

    async def _run_gateway(self, name: str, node: Node) -> None:
        self.gateways[name] = gateway = start_simulated_gateway(self.environment, node, name)
        counters = born_now(gateway.gateway.metrics.registry)
        self.streams.listeners[f"{name}:{METRICS_PORT}"] = StreamListener(node, counters)
        await for_ever()

    async def _run_planner(self, name: str, node: Node) -> None:
        assert self.kubernetes is not None
        assert self.scenario.scaling is not None
        routers = ",".join(self.environment.router_addresses)
        settings = planner_settings(self.scenario.scaling, name, routers, self.scenario.gateways, TRUST)
        serving = serving_simulated_planner(settings, self.kubernetes, self.fabric, node)
        await _hold(serving, partial(self.planners.__setitem__, name))

    def _stop(self, name: str) -> None:
        """Tell a worker to end, as SIGTERM does; it drains first."""
        self.spans.append(FaultInterval(name, "", self.loop.time()))
        worker = self.workers.get(name)
        if worker is not None:
            self.ending.add(name)
            self.nodes[name].context.copy().run(worker.worker.lifecycle.drain)
        else:
            if name in self.nodes:
                self.kill(name, is_silent=False)
            self.forget(name)

    def forget(self, name: str) -> None:
        """Record that a worker that was told to end has ended."""
        self.ending.discard(name)
        if self.kubernetes is not None:
            self.kubernetes.note_end(name)

    def _note_end(self, name: str, node: Node, task: "asyncio.Task[None]") -> None:
        if node.is_dead:
            return
        if name in self.ending and not task.cancelled() and task.exception() is None:
            self.kill(name, is_silent=False)
            self.forget(name)
        elif self._is_end_of_ranks(name, task):
            self.kill(name, is_silent=False)
            self._supervise(name)
        else:
            error = None if task.cancelled() else task.exception()
            self.violate(f"the process {name} ended: {type(error).__name__}: {error}")

    def _is_end_of_ranks(self, name: str, task: "asyncio.Task[None]") -> bool:
        """Whether a worker ended because its group of ranks could not be formed, which is expected after such
        faults.
        """
        error = None if task.cancelled() else task.exception()
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        had_faults = any(span.name == name and span.kind in RANK_FAULTS for span in self.spans)
        is_expected = isinstance(error, ConfigurationError | EngineStoppedError)
        return name in self.environment.widths and is_expected and had_faults

    def _supervise(self, name: str) -> None:
        """Start a worker again after a while, as a supervisor does."""
        span = FaultInterval(name, "", self.loop.time(), kind=FaultKind.RANKS_REFUSED)
        self.spans.append(span)

        def start() -> None:
            span.until_s = self.loop.time()
            self.start(name)

        self.in_world(self.loop.time() + _SUPERVISED_S, start)

    def _note_turn(self, engine: Engine) -> None:
        engine.check()
        self._check_leases()

    def _check_leases(self) -> None:
        """Check that no worker that has had no fault for a while keeps a lease that ended before that."""
        now_s = self.loop.time()
        for name, simulated in self.workers.items():
            end_s = simulated.worker.core.leases.first_end_s
            if (
                end_s + EPSILON_S < now_s
                and name not in self._overdue
                and self.was_well(name, now_s - EPSILON_S, now_s)
            ):
                self._overdue.add(name)
                self.violate(f"{name} keeps a lease {now_s - end_s:.1f} s after its end")

    async def _ask(self, ask: ClientRequest) -> None:
        await asyncio.sleep(ask.at_s - self.loop.time())
        exchange = Exchange(ask, _secret_of(ask.owner), self.loop)
        self.exchanges.append(exchange)
        gateway, node = self.gateways.get(ask.gateway), self.nodes.get(ask.gateway)
        if gateway is None or node is None:
            exchange.lose()
            return
        node.spawn(self.loop, _serve(gateway, exchange), ask.request_id)
        if ask.leaves_after_s is not None:
            self.loop.call_later(ask.leaves_after_s, exchange.leave)
        await exchange.ended.wait()
        outcome = exchange.outcome
        self.on_outcome(outcome)
        self.trace.note(f"{self.loop.time():.9f}", ask.request_id, outcome.status, len(outcome.tokens), outcome.error)

    def in_world(self, at_s: float, action: Callable[..., None], *args: object) -> None:
        """Schedule an action of the simulation itself, which belongs to no node."""
        self.loop.call_at(at_s, action, *args, context=self.loop.world.context)


async def _hold(serving: AbstractAsyncContextManager[Any], on_ready: Callable[[Any], None]) -> None:
    async with serving as process:
        on_ready(process)
        await for_ever()


async def _serve(gateway: SimulatedGateway, exchange: Exchange) -> None:
    await gateway.app(exchange.scope, exchange.receive, exchange.send)


def _secret_of(owner: str) -> str:
    return f"{PREFIX}{digest_of(owner)[:12]}-{digest_of(owner)[:43]}"


def _key_of(owner: str) -> AccountKey:
    secret = _secret_of(owner)
    return AccountKey(key_id=digest_of(owner)[:12], digest=digest_of(secret), name=owner, tenant=owner)
