"""Life cycle of a worker process: assembles the parts from settings, announces itself, serves until told to stop,
drains.

Invariant: everything opened is closed in reverse order, also when starting fails half-way; the worker is announced only
while it can be called.
"""

import asyncio
import contextlib
import gc
import logging
import os
import random
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from prometheus_client import CollectorRegistry

from tandem.compute.native.core_board import MissingBoardError
from tandem.core.clock import Clock, SystemClock
from tandem.core.errors import ConfigurationError, LocalityUnavailableError, TandemError
from tandem.core.machine import random_id, wall_s
from tandem.engine.async_engine import AsyncEngine
from tandem.engine.engine import Engine
from tandem.engine.resolve import Assembly, assemble
from tandem.locality.base import LocalityIndex
from tandem.locality.redis import RedisIndex
from tandem.process.discovery import ANNOUNCE_INTERVAL_S, Discovery, StaticDiscovery, list_interval_s
from tandem.process.discovery_choice import open_discovery
from tandem.process.ports import free_ports
from tandem.process.signals import exit_when_told
from tandem.ranks.remote import RemoteHost
from tandem.routing.snapshot import WorkerState
from tandem.rpc.credentials import Credentials, ProcessRole
from tandem.rpc.messages import ModelInfo, WorkerAddress, WorkerRecord
from tandem.rpc.server import serve_worker
from tandem.telemetry.engine_metrics import WorkerMetrics
from tandem.telemetry.log import configure_logging
from tandem.telemetry.metrics_server import serve_metrics
from tandem.telemetry.tracing import Tracing
from tandem.tls.files import TlsFiles
from tandem.transport.base import MemoryPool
from tandem.transport.card import Identity
from tandem.transport.choose import Site
from tandem.transport.inproc import InprocRegistry
from tandem.worker.checksums import PageChecksums
from tandem.worker.core import WorkerCore
from tandem.worker.feeds import Feeds, RouterIndex, waiting_in_thread
from tandem.worker.host_tier import HostCopier, HostPages
from tandem.worker.identity import blank_state, compatibility_of, device_name, model_info, pool_of, pool_of_arena
from tandem.worker.leases import LeaseBook
from tandem.worker.lifecycle import Lifecycle, LifecycleState
from tandem.worker.ranks import open_ranks, page_bytes_of, recover_from, report_of
from tandem.worker.reports import Reports
from tandem.worker.service import WorkerService
from tandem.worker.settings import WorkerSettings
from tandem.worker.sources import Sources
from tandem.worker.transports import Transports

EXIT_STUCK = 70  # exit code when the engine hangs: EX_SOFTWARE of sysexits.h
REPORT_INTERVAL_S = 0.2  # between two refreshes of the status
EXPIRE_INTERVAL_S = 0.25  # between two looks for expired leases
NUM_THREADS = 32  # for blocking calls beside the event loop

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerProcess:
    """A serving worker and its parts. `metrics_port` is None when there is no metrics server."""

    core: WorkerCore
    lifecycle: Lifecycle
    reports: Reports
    metrics_port: int | None

    async def drain(self, grace_s: float) -> bool:
        """Stops accepting work and waits for requests and leases; returns whether all ended within `grace_s`."""
        self.lifecycle.drain()
        deadline_s = self.core.clock.now_s() + grace_s
        is_idle = await self.lifecycle.until_idle(grace_s)
        while is_idle and len(self.core.leases) and self.core.clock.now_s() < deadline_s:
            await asyncio.sleep(0.05)
        return is_idle and not len(self.core.leases)


def run_worker(settings: WorkerSettings) -> int:
    """Serves until SIGTERM or SIGINT, then drains; returns the exit code."""
    configure_logging(settings.log_level, settings.log_format, settings.worker_id or settings.role)
    return asyncio.run(_run(settings))


async def _run(settings: WorkerSettings) -> int:
    exit_when_told()
    # NOTE: the default has a few threads a core, which calls to routers that are away could take up
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="worker"))
    async with serving_worker(settings) as worker:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, worker.lifecycle.drain)
        me = worker.core.me
        gc.collect()
        gc.freeze()  # NOTE: what was imported stays; looking through it again takes a step's time and more
        logger.info("%s worker %s ready at %s", settings.role, me.worker_id, me.address)
        await worker.lifecycle.until_drained()
        logger.info("worker %s drains", me.worker_id)
        if not await worker.drain(settings.grace_s):
            logger.warning("worker %s stops with work unfinished after %s s", me.worker_id, settings.grace_s)
    return 0


def _share_cores(settings: WorkerSettings, engine: Engine, thread: AsyncEngine) -> None:
    """Borrows cores of idle workers of this machine, and lends its own. Needs compiled kernels."""
    try:
        board = settings.open_core_board()
    except MissingBoardError as error:  # NOTE: it may lie where files are deleted in time
        logger.warning("no cores are borrowed: %s", error)
        return
    if board is not None:
        try:
            board.borrow()
        except ConfigurationError as error:
            logger.warning("no cores are borrowed: %s", error)
        engine.borrowed_s, thread.on_busy = board.borrowed_s, board.set_busy


@contextlib.asynccontextmanager
async def serving_worker(
    settings: WorkerSettings, registry: InprocRegistry | None = None, clock: Clock | None = None
) -> AsyncIterator[WorkerProcess]:
    """Serves for the time of the block.

    Args:
        registry: of the workers of this process, if there are several.
        clock: time of leases, pins and ages of figures; None = the system's.

    Raises:
        ConfigurationError: a setting cannot be honoured, or an address cannot be listened at.
        CheckpointError: the checkpoint cannot be served exactly.
    """
    clock, epoch = clock or SystemClock(), int(wall_s() * 1e6)
    async with contextlib.AsyncExitStack() as opened:
        secret, incarnation = settings.secret, random_id()
        worker_id, bind = settings.worker_id or f"{settings.role}-{incarnation[:8]}", _with_port(settings)
        me = WorkerAddress(worker_id, settings.advertised(bind), incarnation)
        role, spoken_with = ProcessRole(settings.role), (bind, *settings.router_addresses, *settings.rank_addresses)
        credentials = settings.credentials(secret, role, spoken_with, address=me.address, incarnation=incarnation)
        feeds = await _open_feeds(settings, me, epoch, credentials, opened)
        lifecycle, loop = Lifecycle(worker_id), asyncio.get_running_loop()
        leaving = partial(_tell, loop, lifecycle.drain)
        config, ranks = await asyncio.to_thread(open_ranks, settings, credentials, leaving)
        if ranks is not None:
            opened.push_async_callback(asyncio.to_thread, ranks.close)
        assembly = await asyncio.to_thread(assemble, config, clock=clock, emit=feeds.emit, ranks=ranks)
        engine = AsyncEngine(assembly.engine)
        if ranks is not None:
            engine.on_recovering = partial(_tell, loop, lifecycle.recovering)
            recover_from(ranks, engine)
        _share_cores(settings, assembly.engine, engine)
        host = await asyncio.to_thread(_open_host, settings, assembly, clock, engine)
        if host is not None:
            opened.push_async_callback(asyncio.to_thread, host.close)
        await opened.enter_async_context(engine)
        compatibility = compatibility_of(assembly)
        identity = Identity(compatibility, secret, incarnation)
        site = Site.here(device_name(assembly))
        pool, others = pool_of_arena(assembly, settings.hosts), () if ranks is None else ranks.state_hosts
        transports = await asyncio.to_thread(
            _open_transports, settings, pool, identity, site, registry, credentials.tls, others
        )
        page_bytes = page_bytes_of(assembly, pool, others)
        opened.push_async_callback(asyncio.to_thread, transports.close)
        prometheus = CollectorRegistry()
        tracing = Tracing.configure(me.worker_id, settings.otlp_endpoint)
        opened.push_async_callback(asyncio.to_thread, tracing.close)
        core = WorkerCore(
            me=me,
            epoch=epoch,
            engine=engine,
            leases=LeaseBook(settings.lease_ttl_s, clock, lambda name: engine.post(lambda e: e.kv.drop(name))),
            transports=transports,
            checksums=PageChecksums(assembly.arena, settings.checksum_share, pages=assembly.pages, found=page_bytes),
            metrics=WorkerMetrics(
                prometheus,
                settings.model_name,
                max_model_len=assembly.engine.limits.max_model_len,
                max_drafts=settings.num_speculative_tokens,
            ),
            tracing=tracing,
            site=site,
            compatibility=compatibility,
            vocab_size=assembly.engine.model.vocab_size,
            ranked=assembly.pages.ranked,
            block_size=assembly.arena.layout.block_size,
            block_bytes=assembly.pages.ranked.num_ranks * assembly.arena.layout.page_bytes,
            num_blocks=assembly.arena.num_pages,
            clock=clock,
            num_ranks=settings.num_ranks,
            ranks=partial(report_of, ranks),
            host=host,
            draft_states=assembly.engine.draft_states,
            credentials=credentials,
        )
        blank, model = blank_state(settings, me.worker_id, assembly, compatibility), model_info(settings, assembly)
        serving = serving_core(core, settings, bind, feeds, blank, model, prometheus, lifecycle)
        yield await opened.enter_async_context(serving)


@contextlib.asynccontextmanager
async def serving_core(
    core: WorkerCore,
    settings: WorkerSettings,
    bind: str,
    feeds: Feeds,
    blank: WorkerState,
    model: ModelInfo,
    prometheus: CollectorRegistry,
    lifecycle: Lifecycle,
) -> AsyncIterator[WorkerProcess]:
    """Serves a running engine: answers calls at `bind`, reports, expires leases, is announced; as `serving_worker`.

    Args:
        blank, model: description of this worker for routers, without load.
        lifecycle: of this worker, still starting.
    """
    async with contextlib.AsyncExitStack() as opened:
        sources = Sources(core)
        opened.push_async_callback(sources.close)
        reports = Reports(core, lifecycle, blank, model, lambda: sources.links, lambda: sources.unreachable)
        await reports.refresh()
        server = await serve_worker(WorkerService(core, sources, lifecycle, reports), bind, core.credentials)
        opened.push_async_callback(server.stop, 0.0)
        metrics_port = await _open_metrics(settings, prometheus, lifecycle, opened)
        discovery = _open_discovery(settings, core.credentials)
        opened.push_async_callback(discovery.close)
        pool = pool_of(core.compatibility)
        record = WorkerRecord(core.me, str(settings.role), settings.model_name, pool, core.epoch)
        opened.push_async_callback(_withdraw, discovery, record)  # NOTE: once nothing announces it again
        tasks = await opened.enter_async_context(asyncio.TaskGroup())  # NOTE: a bug in one of them ends the process
        for work in (
            feeds.run(),
            _refresh(reports, core),
            _expire(core),
            _guard(core.engine, settings.max_step_s),
            _announce(discovery, record, sources, core.clock),
        ):
            opened.callback(tasks.create_task(work).cancel)
        lifecycle.ready()
        yield WorkerProcess(core, lifecycle, reports, metrics_port)


def _tell(loop: asyncio.AbstractEventLoop, call: Callable[..., None], *values: bool) -> None:
    """Calls `call` in `loop`, from another thread."""
    with contextlib.suppress(RuntimeError):  # the loop has closed, as where the worker ends meanwhile
        loop.call_soon_threadsafe(call, *values)


def _with_port(settings: WorkerSettings) -> str:
    """The address to listen at, with a definite port, since others need it before the first call can arrive."""
    host, _, port = settings.bind.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigurationError(f"bind={settings.bind!r} is not host:port")
    return f"{host}:{int(port) or free_ports(1, settings.host, random.Random())[0]}"


async def _open_feeds(
    settings: WorkerSettings,
    me: WorkerAddress,
    epoch: int,
    credentials: Credentials,
    opened: contextlib.AsyncExitStack,
) -> Feeds:
    """Opens the feed into Redis if there is one, else a feed into every router's index."""
    indexes: list[LocalityIndex] = []
    if settings.redis:
        remote = RedisIndex(settings.redis)
        opened.callback(remote.close)
        indexes.append(remote)
    else:
        for address in settings.router_addresses:
            router = RouterIndex(address, credentials, waiting_in_thread(asyncio.get_running_loop()))
            opened.push_async_callback(router.close)
            indexes.append(router)
    return Feeds(indexes, me.worker_id, epoch)


def _open_transports(
    settings: WorkerSettings,
    pool: MemoryPool,
    identity: Identity,
    site: Site,
    registry: InprocRegistry | None,
    tls: TlsFiles | None,
    others: Sequence[RemoteHost],
) -> Transports:
    advertised = None if settings.advertise is None else settings.advertise.rpartition(":")[0].strip("[]")
    return Transports(
        pool,
        identity,
        # NOTE: what others would register is memory, and that of ranks elsewhere has nothing in it
        wanted=settings.transport if settings.hosts == 1 else "tcp",
        bind_host=settings.host,
        advertise_host=advertised,
        kv_port=settings.kv_port,
        registry=registry,
        tls=tls,
        has_rdma=site.has_rdma,
        other_hosts=others,
    )


def _open_host(settings: WorkerSettings, assembly: Assembly, clock: Clock, engine: AsyncEngine) -> HostCopier | None:
    """Creates the host tier, before the engine starts. None if it would not hold a single block."""
    pages = HostPages(assembly.pages.pages, settings.host_kv_bytes)
    if not pages.num_slots:
        return None
    copier = HostCopier(pages, clock, engine.post)
    assembly.engine.kv.pinned.blocks.attach_host(pages.num_slots, copier.start_move)
    return copier


def _open_discovery(settings: WorkerSettings, credentials: Credentials) -> Discovery:
    if not settings.redis and not settings.router_addresses:
        return StaticDiscovery(())
    return open_discovery(settings.redis, settings.router_addresses, credentials)


async def _open_metrics(
    settings: WorkerSettings, registry: CollectorRegistry, lifecycle: Lifecycle, opened: contextlib.AsyncExitStack
) -> int | None:
    def health() -> tuple[int, dict[str, object]]:
        return (200 if lifecycle.state is LifecycleState.READY else 503), {"status": str(lifecycle.state)}

    if settings.metrics_port is None:
        return None
    server = await serve_metrics(registry, settings.host, settings.metrics_port, health)
    opened.push_async_callback(server.close)
    return server.port


async def _refresh(reports: Reports, core: WorkerCore) -> None:
    """Refreshes the status regularly; a failed engine ends the process, so that its supervisor restarts it."""
    while True:
        await reports.refresh()
        core.metrics.observe_status(reports.latest())
        core.metrics.observe_leases({"valid": len(core.leases), "expired": core.leases.num_expired})
        core.metrics.observe_promised(reports.promised, core.block_bytes)
        core.metrics.observe_drafts(reports.drafts)
        core.metrics.observe_reads(reports.read_bytes)
        core.metrics.observe_held(reports.held.num_bytes, reports.held.held_page_bytes)
        ranks = core.ranks()
        if ranks is not None and ranks.experts is not None:
            core.metrics.observe_experts(ranks.experts)
        await asyncio.sleep(REPORT_INTERVAL_S)


async def _guard(engine: AsyncEngine, max_step_s: float) -> None:
    """Ends the process when the engine hangs, since its event loop would keep reporting that the worker is alive."""
    while True:
        await asyncio.sleep(min(1.0, max_step_s / 4))
        if (busy_s := engine.busy_s()) > max_step_s:
            logger.critical("the engine has been busy with one step for %.0f s: this process ends at once", busy_s)
            os._exit(EXIT_STUCK)  # NOTE: an orderly end would wait for the engine


async def _expire(core: WorkerCore) -> None:
    while True:
        for lease_id in core.leases.expire():
            logger.warning("lease %s was not renewed within %s s and has ended", lease_id, core.leases.ttl_s)
        await asyncio.sleep(EXPIRE_INTERVAL_S)


async def _announce(discovery: Discovery, record: WorkerRecord, sources: Sources, clock: Clock) -> None:
    """Announces this worker and connects to the others. A persistent problem is logged once."""
    complaint, list_at_s = "", 0.0
    async with asyncio.TaskGroup() as tasks:
        meeting: asyncio.Task[None] | None = None
        while True:
            try:
                await discovery.announce(record)
                # NOTE: a peer that is silent takes seconds to meet, and a record lives three
                if (meeting is None or meeting.done()) and clock.now_s() >= list_at_s:
                    listed = await discovery.workers()
                    list_at_s = clock.now_s() + list_interval_s(len(listed))
                    others = [other.worker for other in listed if other.pool == record.pool]
                    meeting = tasks.create_task(sources.meet(others))
                complaint = ""
            except TandemError as error:
                if str(error) != complaint:
                    complaint = str(error)
                    logger.warning("not announced: %s", complaint)
            await asyncio.sleep(ANNOUNCE_INTERVAL_S)


async def _withdraw(discovery: Discovery, record: WorkerRecord) -> None:
    with contextlib.suppress(LocalityUnavailableError):
        await discovery.withdraw(record)
