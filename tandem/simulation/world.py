"""World of one run: starts a scenario's processes, injects its faults and sends its clients' requests."""

import asyncio
import random
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

from tandem.accounts.key import PREFIX, AccountKey, digest_of
from tandem.engine.engine import Engine
from tandem.routing.snapshot import Role
from tandem.rpc.network import current_network
from tandem.simulation.client import Exchange
from tandem.simulation.executor import StepCost
from tandem.simulation.fabric import EventTrace, Fabric, NetworkConditions
from tandem.simulation.loop import VirtualLoop
from tandem.simulation.network import SimulatedNetwork
from tandem.simulation.node import Node
from tandem.simulation.processes import (
    SimulatedEnvironment,
    SimulatedGateway,
    SimulatedWorker,
    WorkerSizes,
    for_ever,
    serving_simulated_router,
    serving_simulated_worker,
    start_simulated_gateway,
)
from tandem.simulation.redis import REDIS_ADDRESS, SimulatedRedis
from tandem.simulation.scenario import TENANTS, WARM_UP_S, ClientRequest, Fault, FaultKind, Scenario
from tandem.simulation.store import STORE, StoreServer
from tandem.simulation.streams import StreamListener, Streams

PATIENCE_S = 75.0  # after the last fault is over and the last request was made; past it a request waits for ever
EPSILON_S = 2.5
_CHECK_EVERY = 16  # turns of an engine


@dataclass(slots=True)
class FaultInterval:
    """Time interval of a fault; `until_s` is None while it lasts."""

    name: str
    other: str
    from_s: float
    until_s: float | None = None


class World:
    """State of one run."""

    def __init__(self, scenario: Scenario, *, keep_trace: bool = False) -> None:
        self.scenario = scenario
        seed = str(scenario.seed)
        self.loop = VirtualLoop(seed)
        self.trace = EventTrace(keep_trace)
        conditions = NetworkConditions(
            scenario.conditions.mean_s, scenario.conditions.slow_share, scenario.conditions.slow_s
        )
        self.fabric = Fabric(self.loop, random.Random(f"{seed} fabric"), self.trace, conditions)
        self.network = SimulatedNetwork(self.fabric)
        self.store = StoreServer(self.loop.world, [_key_of(owner) for owner in TENANTS], scenario.account_lease_s)
        store_node = Node(STORE, self.loop.time, random.Random(f"{seed} {STORE}"))
        self.loop.add(store_node)
        self.streams = Streams(self.fabric)
        self.loop.connect = self.streams.connect
        self.redis = SimulatedRedis(store_node.wall_s)
        self.streams.listeners[REDIS_ADDRESS] = StreamListener(
            store_node, self.redis.session, lambda: not self.redis.is_down
        )
        self.environment = SimulatedEnvironment(
            self.loop,
            self.fabric,
            self.store,
            self.redis,
            [self.address_of(name) for name in scenario.routers],
            WorkerSizes(num_blocks=scenario.num_blocks),
            scenario.lease_ttl_s,
            scenario.max_local_tokens,
            StepCost(scenario.step_s),
            scenario.is_open,
            scenario.uses_redis,
        )
        self.nodes: dict[str, Node] = {}
        self.workers: dict[str, SimulatedWorker] = {}
        self.gateways: dict[str, SimulatedGateway] = {}
        self.exchanges: list[Exchange] = []
        self.crashed: dict[str, list[float]] = {}
        self.spans: list[FaultInterval] = []
        self.violations: list[str] = []
        self._num_started = 0
        self._num_turns = 0

    def address_of(self, name: str) -> str:
        return f"{name}:{1000 + self.scenario.names.index(name)}"

    def violate(self, what: str) -> None:
        self.violations.append(f"{self.loop.time():.3f} s: {what}")

    def was_well(self, name: str, since_s: float, until_s: float) -> bool:
        """Whether no fault concerned it then. NOTE: a partition concerns both ends, whoever is between them."""
        return not any(
            name in (span.name, span.other, "everybody") or span.name in ("everybody", STORE)
            for span in self.spans
            if span.from_s < until_s and (span.until_s is None or span.until_s > since_s)
        )

    async def run(self) -> None:
        """Run from the first process to the last check."""
        loop = self.loop
        for name in self.scenario.names:
            self.start(name)
        for fault in self.scenario.faults:
            self._in_world(fault.at_s, self._break, fault)
        waiting = [loop.create_task(self._ask(ask), name=ask.request_id) for ask in self.scenario.asks]
        last_s = max([fault.at_s + fault.for_s for fault in self.scenario.faults] + [WARM_UP_S])
        last_s = max([last_s, *(ask.at_s for ask in self.scenario.asks)])
        if waiting:
            await asyncio.wait(waiting, timeout=last_s + PATIENCE_S - loop.time())
        await asyncio.sleep(max(0.0, last_s - loop.time()))
        await asyncio.sleep(max(self.scenario.lease_ttl_s, self.scenario.account_lease_s) + EPSILON_S)

    def start(self, name: str) -> None:
        """Start a process on a new node."""
        self._num_started += 1
        node = Node(name, self.loop.time, random.Random(f"{self.scenario.seed} {name} {self._num_started}"))
        node.context.run(current_network.set, self.network.of(node))
        self.loop.add(node)
        self.nodes[name] = node
        role = name.partition("-")[0]
        main = {"router": self._run_router, "prefill": self._run_worker, "decode": self._run_worker}.get(
            role, self._run_gateway
        )
        task = node.spawn(self.loop, main(name, node), name)
        task.add_done_callback(lambda _: self._note_end(name, node, task), context=self.loop.world.context)

    def kill(self, name: str, *, is_silent: bool) -> None:
        """End a process as SIGKILL does."""
        node = self.nodes.pop(name)
        self.crashed.setdefault(name, []).append(self.loop.time())
        self.workers.pop(name, None)
        self.environment.routers.pop(self.address_of(name), None)
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
        await _hold(serving, partial(self.workers.__setitem__, name))

    async def _run_gateway(self, name: str, node: Node) -> None:
        self.gateways[name] = start_simulated_gateway(self.environment, node, name)
        await for_ever()

    def _note_end(self, name: str, node: Node, task: "asyncio.Task[None]") -> None:
        if not node.is_dead:
            error = None if task.cancelled() else task.exception()
            self.violate(f"the process {name} ended: {type(error).__name__}: {error}")

    def _note_turn(self, engine: Engine) -> None:
        self._num_turns += 1
        if self._num_turns % _CHECK_EVERY == 0:
            engine.check()

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
        self.trace.note(f"{self.loop.time():.9f}", ask.request_id, outcome.status, len(outcome.tokens), outcome.error)

    def _break(self, fault: Fault) -> None:
        """Begin a fault and schedule its end."""
        self.trace.note(f"{self.loop.time():.9f}", "fault", fault)
        undo = self._begun(fault)
        if undo is not None:
            span = FaultInterval(fault.name, fault.other, self.loop.time())
            self.spans.append(span)

            def end() -> None:
                span.until_s = self.loop.time()
                undo()

            self._in_world(self.loop.time() + fault.for_s, end)

    def _begun(self, fault: Fault) -> Callable[[], None] | None:
        """Begin a fault; returns the function that ends it, None if it has no end or could not begin."""
        node = self.nodes.get(fault.name)
        match fault.kind:
            case FaultKind.PAUSE if node is not None and not node.is_paused:
                node.is_paused = True
                return partial(setattr, node, "is_paused", False)
            case FaultKind.CRASH if node is not None:
                self.kill(fault.name, is_silent=bool(fault.size))
                return partial(self._restart, fault)
            case FaultKind.SLOW if node is not None:
                node.slowness = fault.size
                return partial(setattr, node, "slowness", 1.0)
            case FaultKind.CUT | FaultKind.CUT_CALLS:
                is_readable = fault.kind is FaultKind.CUT_CALLS
                self.fabric.block(fault.name, fault.other, is_readable=is_readable)
                self.fabric.block(fault.other, fault.name, is_readable=is_readable)
                return partial(self._heal, fault)
            case FaultKind.CUT_ONE_WAY:
                self.fabric.block(fault.name, fault.other)
                return partial(self._heal, fault)
            case FaultKind.CLOCK if node is not None:
                node.wall_offset_s += fault.size
            case FaultKind.LOSSY:
                conditions = self.fabric.conditions
                former, conditions.slow_share = conditions.slow_share, 0.3
                return partial(setattr, conditions, "slow_share", former)
            case FaultKind.SLOW_READS:
                self.fabric.conditions.read_s = fault.size
                return partial(setattr, self.fabric.conditions, "read_s", 0.0)
            case FaultKind.STORE_DOWN:
                self.store.is_down = self.redis.is_down = True
                self.streams.cut_from(STORE)
                return self._restart_store
            case FaultKind.STORE_FAILOVER:
                self.store.fail_over(fault.size)
                self.redis.fail_over(fault.size)
                self.streams.cut_from(STORE)
            case FaultKind.STORE_CLOCK:
                self.store.clock_offset_s += fault.size
                self.redis.clock_offset_s += fault.size
            case _:
                pass
        return None

    def _restart_store(self) -> None:
        self.store.is_down = self.redis.is_down = False

    def _restart(self, fault: Fault) -> None:
        self.start(fault.name)
        self.fabric.come_back(fault.name, fault.for_s)

    def _heal(self, fault: Fault) -> None:
        self.fabric.heal(fault.name, fault.other)
        if fault.kind is not FaultKind.CUT_ONE_WAY:
            self.fabric.heal(fault.other, fault.name)

    def _in_world(self, at_s: float, action: Callable[..., None], *args: object) -> None:
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
