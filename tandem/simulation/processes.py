"""Workers, routers and gateways on simulated nodes: production code, assembled with simulated parts.

KV memory, steps, reads and the shared store are simulated.
"""

import asyncio
import functools
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp, Receive, Scope, Send

from tandem.accounts.accounts import Accounts
from tandem.accounts.prices import Prices
from tandem.accounts.redis_store import RedisAccounts
from tandem.accounts.store import LEASE_S
from tandem.core.clock import Clock
from tandem.core.machine import random_id, wall_s
from tandem.core.pins import Pin
from tandem.engine.async_engine import AsyncEngine
from tandem.engine.engine import Engine
from tandem.engine.resolve import Assembly
from tandem.gateway.app import guard_of
from tandem.gateway.dialect import Isolate, ParsedRequest
from tandem.gateway.edge import Edge
from tandem.gateway.fast_lane import FastLane
from tandem.gateway.gateway import Gateway
from tandem.gateway.grammar_check import GrammarCheck
from tandem.gateway.known_conversations import KnownConversations
from tandem.gateway.model import ServedModel
from tandem.gateway.openai.completions import CompletionDialect
from tandem.gateway.parsing.answer_format import AnswerFormat
from tandem.gateway.prompt_encoder import PromptEncoder
from tandem.gateway.settings import GatewaySettings
from tandem.kvcache.manager import KVCacheManager
from tandem.locality.redis import RedisIndex
from tandem.ranks.group import RankGroup
from tandem.router.process import RouterProcess, serving_router
from tandem.router.settings import RouterSettings
from tandem.routing.snapshot import Role
from tandem.rpc.credentials import Credentials, ProcessRole
from tandem.rpc.messages import WorkerAddress
from tandem.simulation.assembly import EngineParts, WorkerSizes, simulated_tokenizer
from tandem.simulation.blocking_redis import JobsBeside, connection_class
from tandem.simulation.disk import JournalOnDisk, SimulatedDisk
from tandem.simulation.engine import FiberEngine, SteppedEngine
from tandem.simulation.executor import SimulatedExecutor, StepCost
from tandem.simulation.fabric import Fabric
from tandem.simulation.fibers import in_fiber, waiting_in_fiber
from tandem.simulation.host_tier import SimulatedCopier
from tandem.simulation.loop import VirtualLoop
from tandem.simulation.model import MODEL, VOCAB_SIZE
from tandem.simulation.node import Node
from tandem.simulation.ranks import SimulatedRankSystem
from tandem.simulation.redis import REDIS_ADDRESS, SimulatedRedis
from tandem.simulation.streams import Streams
from tandem.simulation.transport import SimulatedTransport, TransportRegistry
from tandem.telemetry.engine_metrics import WorkerMetrics
from tandem.telemetry.tracing import Tracing
from tandem.transport.base import KVTransport
from tandem.transport.card import Identity
from tandem.transport.choose import Site
from tandem.worker.checksums import PageChecksums
from tandem.worker.core import WorkerCore
from tandem.worker.feeds import Feeds, RouterIndex
from tandem.worker.host_tier import HostCopier, HostPages
from tandem.worker.identity import blank_state, compatibility_of, model_info, pool_of_arena
from tandem.worker.leases import LeaseBook
from tandem.worker.lifecycle import Lifecycle
from tandem.worker.process import WorkerProcess, serving_core
from tandem.worker.ranks import open_ranks, recover_from, report_of
from tandem.worker.settings import DecodeSettings, PrefillSettings, WorkerSettings
from tandem.worker.transports import Transports

SECRET = "the secret of a simulation" * 2
TRUST = {"cluster_secret": SECRET, "insecure": True}  # NOTE: there is no wire that anybody could listen at
COMPLETIONS = "/v1/completions"
PIN = "pin "  # before the seconds, as the user of a request: its prompt is kept for so long


@dataclass(slots=True)
class SimulatedEnvironment:
    """Shared parts of one simulation. `disks`: of gateways, by name. `is_open`: gateways ask for no keys. `uses_redis`:
    discovery and locality index are in `redis` instead of in routers. `widths`: numbers of ranks by worker, if more
    than 1. `rank_systems`: of running workers with several ranks; `all_rank_systems`: also of those that have ended.
    """

    loop: VirtualLoop
    fabric: Fabric
    streams: Streams
    redis: SimulatedRedis
    router_addresses: Sequence[str]
    sizes: WorkerSizes = field(default_factory=WorkerSizes)
    lease_ttl_s: float = 10.0
    account_lease_s: float = LEASE_S
    max_local_tokens: int = 16
    cost: StepCost = field(default_factory=StepCost)
    is_open: bool = False
    uses_redis: bool = False
    transports: TransportRegistry = field(default_factory=TransportRegistry)
    disks: Mapping[str, SimulatedDisk] = field(default_factory=dict)
    widths: Mapping[str, int] = field(default_factory=dict)
    rank_systems: dict[str, SimulatedRankSystem] = field(default_factory=dict)
    all_rank_systems: list[SimulatedRankSystem] = field(default_factory=list)

    @property
    def redis_url(self) -> str | None:
        return f"redis://{REDIS_ADDRESS}" if self.uses_redis else None


@dataclass(frozen=True, slots=True)
class SimulatedWorker:
    """A serving worker, and its engine, for invariants."""

    worker: WorkerProcess
    engine: Engine


class _OneTransport(Transports):
    """`Transports` with the simulated transport only."""

    def __init__(self, transport: KVTransport) -> None:
        self.wanted = transport.name
        self._opened = {transport.name: transport}


def _tell(loop: asyncio.AbstractEventLoop, lifecycle: Lifecycle, is_recovering: bool) -> None:
    loop.call_soon_threadsafe(lifecycle.recovering, is_recovering)


@asynccontextmanager
async def serving_simulated_worker(
    environment: SimulatedEnvironment,
    node: Node,
    role: Role,
    worker_id: str,
    address: str,
    on_turn: Callable[[Engine], None],
) -> AsyncIterator[SimulatedWorker]:
    """Runs a worker for the time of the block; counterpart of `worker.process.serving_worker`."""
    settings = _worker_settings(environment, role, worker_id, address)
    me, epoch = WorkerAddress(worker_id, address, random_id()), int(wall_s() * 1e6)
    credentials = Credentials(SECRET.encode(), ProcessRole(settings.role), address, me.incarnation)
    feeds = _open_feeds(environment, node, me, epoch, credentials)
    assembly, writer, group = await _open_engine(environment, node, settings, credentials, feeds)
    lifecycle = Lifecycle(worker_id)
    engine: AsyncEngine
    if group is None:
        engine = SteppedEngine(assembly.engine, environment.loop, node, on_turn)
    else:
        engine = FiberEngine(assembly.engine, environment.loop, node, on_turn)
        loop = asyncio.get_running_loop()
        engine.on_recovering = lambda is_recovering: _tell(loop, lifecycle, is_recovering)
        recover_from(group, engine)
    engine.start()
    compatibility = compatibility_of(assembly)
    identity = Identity(compatibility, SECRET.encode(), me.incarnation)
    transport = SimulatedTransport(environment.fabric, node, pool_of_arena(assembly), identity, environment.transports)
    transport.on_write = functools.partial(_require_in_transfer, assembly.engine.kv, worker_id)
    writer.on_write = functools.partial(_require_not_in_transfer, assembly.engine.kv, worker_id)
    prometheus = CollectorRegistry()
    host = _open_host(environment, node, assembly, engine)
    core = WorkerCore(
        me=me,
        epoch=epoch,
        engine=engine,
        leases=LeaseBook(settings.lease_ttl_s, node, lambda name: engine.post(lambda e: e.kv.drop(name))),
        transports=_OneTransport(transport),
        checksums=PageChecksums(assembly.arena, settings.checksum_share, pages=assembly.pages),
        metrics=WorkerMetrics(prometheus, MODEL, max_model_len=environment.sizes.max_model_len),
        tracing=Tracing.configure(worker_id, None),
        site=Site("one host", "one", "one", "one process", "cpu", "none in a simulation", False),
        compatibility=compatibility,
        vocab_size=VOCAB_SIZE,
        ranked=assembly.pages.ranked,
        block_size=assembly.arena.layout.block_size,
        block_bytes=assembly.pages.ranked.num_ranks * assembly.arena.layout.page_bytes,
        num_blocks=assembly.arena.num_pages,
        clock=node,
        credentials=credentials,
        num_ranks=settings.num_ranks,
        ranks=functools.partial(report_of, group),
        host=host,
    )
    blank, model = blank_state(settings, worker_id, assembly, compatibility), model_info(settings, assembly)
    async with serving_core(core, settings, address, feeds, blank, model, prometheus, lifecycle) as worker:
        yield SimulatedWorker(worker, assembly.engine)


def _open_host(
    environment: SimulatedEnvironment, node: Node, assembly: Assembly, engine: AsyncEngine
) -> HostCopier | None:
    """Opens the host tier, like `worker.process`."""
    num_slots = environment.sizes.num_host_slots
    if not num_slots:
        return None
    pages = assembly.pages.pages
    host = HostPages(pages, num_slots * pages.shape[0] * pages.shape[2])
    copier = SimulatedCopier(host, node, engine.post, environment.loop, node)
    assembly.engine.kv.pinned.blocks.attach_host(num_slots, copier.start_move)
    return copier


@asynccontextmanager
async def serving_simulated_router(
    environment: SimulatedEnvironment, node: Node, address: str
) -> AsyncIterator[RouterProcess]:
    """Runs a router for the time of the block, by `router.process.serving_router`."""
    options: dict[str, Any] = {"bind": address, **TRUST, "max_local_tokens": environment.max_local_tokens}
    settings = RouterSettings(**options, redis=environment.redis_url)
    shared = _index_in_redis(environment, node) if environment.uses_redis else None
    async with serving_router(settings, shared) as router:
        yield router


@dataclass(frozen=True, slots=True)
class SimulatedGateway:
    """A serving gateway. `app`: its HTTP endpoint for completions."""

    gateway: Gateway
    app: ASGIApp


def start_simulated_gateway(environment: SimulatedEnvironment, node: Node, name: str) -> SimulatedGateway:
    """Starts a gateway with production's journeys, accounts and HTTP layer. Called in the node's context."""
    options: dict[str, Any] = {
        "model": MODEL,
        "routers": ",".join(environment.router_addresses),
        **TRUST,
    }
    tracing = Tracing.configure(name, None)

    def open_accounts(_: GatewaySettings, clock: Clock) -> Accounts | None:
        if environment.is_open:
            return None
        journal = JournalOnDisk(environment.disks[name])
        store = RedisAccounts(f"redis://{REDIS_ADDRESS}", clock, lease_s=environment.account_lease_s)
        return Accounts(store, Prices(), clock, journal=journal, lease_s=environment.account_lease_s)

    settings = GatewaySettings(**options)
    gateway = Gateway(settings, _served_model(), node, tracing, open_accounts)
    gateway.start()
    fast = FastLane(_nothing_else, gateway, {COMPLETIONS: _PinningDialect(gateway.dialect_context)})
    return SimulatedGateway(gateway, Edge(fast, gateway.ids, guard_of(gateway, settings).admit))


class _PinningDialect(CompletionDialect):
    """Completions whose request can ask for a pinned prompt, as cache breakpoints do in other dialects."""

    async def read(self, body: bytes, request_id: str, isolate: Isolate) -> ParsedRequest:
        parsed = await super().read(body, request_id, isolate)
        user = json.loads(body)["user"]
        if not user.startswith(PIN):
            return parsed
        pin = Pin(len(parsed.request.choices[0].prompt_token_ids), float(user.removeprefix(PIN)))
        return replace(parsed, request=replace(parsed.request, pins=(pin,)))


async def _nothing_else(scope: Scope, receive: Receive, send: Send) -> None:
    raise AssertionError(f"nobody asks for {scope['path']} in a simulation")


def _worker_settings(
    environment: SimulatedEnvironment, role: Role, worker_id: str, address: str
) -> DecodeSettings | PrefillSettings:
    kind: type[DecodeSettings] | type[PrefillSettings] = DecodeSettings if role is Role.DECODE else PrefillSettings
    options: dict[str, Any] = {
        "model": MODEL,
        "served_model_name": MODEL,
        "worker_id": worker_id,
        "bind": address,
        "routers": ",".join(environment.router_addresses),
        "redis": environment.redis_url,
        "lease_ttl_s": environment.lease_ttl_s,
        "transport": "inproc",
        "tp": environment.widths.get(worker_id, 1),
        **TRUST,
    }
    return kind(**options)


def _open_feeds(
    environment: SimulatedEnvironment, node: Node, me: WorkerAddress, epoch: int, credentials: Credentials
) -> Feeds:
    """Opens the feeds to the locality indexes, like `worker.process`."""
    if environment.uses_redis:
        return Feeds([_index_in_redis(environment, node)], me.worker_id, epoch)
    wait = waiting_in_fiber(environment.loop, node)
    indexes = [RouterIndex(address, credentials, wait) for address in environment.router_addresses]
    return Feeds(indexes, me.worker_id, epoch, functools.partial(in_fiber, environment.loop, node))


def _index_in_redis(environment: SimulatedEnvironment, node: Node) -> RedisIndex:
    """Opens the locality index in Redis, like `worker.process` and `router.process`."""
    return RedisIndex(
        f"redis://{REDIS_ADDRESS}",
        clock=node,
        connection_class=connection_class(environment.fabric, environment.streams, node),
        background=JobsBeside(environment.loop),
    )


async def _open_engine(
    environment: SimulatedEnvironment, node: Node, settings: WorkerSettings, credentials: Credentials, feeds: Feeds
) -> tuple[Assembly, SimulatedExecutor | SimulatedRankSystem, RankGroup | None]:
    """Builds the engine, like `worker.process`; returns also the object that reports which blocks steps write, and the
    ranks.
    """
    parts = EngineParts(environment.sizes, environment.loop, node, environment.cost, feeds.emit)
    if settings.num_ranks == 1:
        return *parts.assembled(), None
    seed = f"{node.random.random()} ranks"
    system = SimulatedRankSystem(environment.fabric, node, environment.sizes.block_size, environment.cost, seed)
    environment.rank_systems[node.name] = system
    environment.all_rank_systems.append(system)

    def open_group() -> tuple[Assembly, RankGroup]:
        _, group = open_ranks(settings, credentials, lambda: None, system)
        assert group is not None
        assembly, forward = parts.assembled_of(group)
        forward.on_write = lambda blocks: system.on_write(blocks)
        return assembly, group

    assembly, group = await in_fiber(environment.loop, node, open_group)
    return assembly, system, group


@functools.cache
def _served_model() -> ServedModel:
    tokenizer = simulated_tokenizer()
    answers = AnswerFormat.detect(None, tokenizer, tool_parser="none", reasoning_parser="none")
    checks, encoder, conversations = GrammarCheck(tokenizer), PromptEncoder(tokenizer), KnownConversations(0)
    return ServedModel(MODEL, tokenizer, None, 0, False, answers, checks, encoder, conversations)


def _in_transfer(kv: KVCacheManager) -> set[int]:
    return {block for hold in kv._holds.values() if hold.kind == "transfer" for block in hold.block_ids}


def _require_in_transfer(kv: KVCacheManager, worker_id: str, blocks: Sequence[int]) -> None:
    loose = set(blocks) - _in_transfer(kv)
    assert not loose, f"a transfer writes blocks {sorted(loose)} of {worker_id}, which are not held for one"


def _require_not_in_transfer(kv: KVCacheManager, worker_id: str, blocks: Sequence[int]) -> None:
    both = set(blocks) & _in_transfer(kv)
    assert not both, f"a step writes blocks {sorted(both)} of {worker_id}, which a transfer may write"


async def for_ever() -> None:
    """Waits until cancelled."""
    await asyncio.Event().wait()
