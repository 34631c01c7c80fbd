"""Life cycle of a router process: assembles the parts from settings and serves until told to stop.

Invariant: whatever was opened is closed in reverse order, even if starting fails half-way.
"""

import asyncio
import contextlib
import gc
import logging
import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial

from tandem.core.clock import SystemClock
from tandem.core.errors import LocalityUnavailableError
from tandem.locality.base import LocalityIndex
from tandem.locality.embedded import EmbeddedIndex
from tandem.locality.redis import RedisIndex
from tandem.process.discovery import Discovery, EmbeddedDiscovery, StaticDiscovery
from tandem.process.discovery_redis import RedisDiscovery
from tandem.process.fleet_view import FleetView
from tandem.process.fleet_watch import FleetWatch
from tandem.process.signals import run_until, stop_event
from tandem.router.metrics import RouterMetrics
from tandem.router.prefix_lookup import PrefixLookup
from tandem.router.service import RouterService
from tandem.router.settings import RouterSettings
from tandem.routing.calibration import Calibration
from tandem.routing.fleet import Fleet
from tandem.routing.outliers import Outliers, OutlierSettings
from tandem.routing.pairing import Pairer
from tandem.routing.policies import policy_named
from tandem.routing.snapshot import Links, LinkState
from tandem.routing.speed import DecodeSpeed, PrefillSpeed, Speed
from tandem.rpc.client import client_of
from tandem.rpc.credentials import Credentials, ProcessRole
from tandem.rpc.server import serve_router
from tandem.telemetry.log import configure_logging
from tandem.telemetry.metrics_server import serve_metrics

_LOG = logging.getLogger(__name__)

# NOTE: where calibration starts; a kind's first measurements replace it
_FIRST_SPEED = Speed(PrefillSpeed(2.0, 0.05, 1e-6), DecodeSpeed(5.0, 0.05, 5e-5))
_FIRST_LINK = LinkState(bytes_per_s=1e9, latency_ms=0.2)
_GAUGES_INTERVAL_S = 1.0  # between two updates of the gauges
_MAX_YOUNG_OBJECTS = 20_000  # allocated before Python collects garbage


@dataclass(frozen=True, slots=True)
class RouterProcess:
    """A running router. `metrics_port` is None if there is no metrics server; `tasks` never end on their own."""

    service: RouterService
    address: str
    metrics_port: int | None
    tasks: tuple[asyncio.Task[None], ...]


def run_router(settings: RouterSettings) -> int:
    """Serve until SIGTERM or SIGINT; the exit code."""
    configure_logging(settings.log_level, settings.log_format, "router")
    return asyncio.run(_run(settings))


async def _run(settings: RouterSettings) -> int:
    stopped = stop_event()
    async with serving_router(settings) as router:
        relax_garbage_collector()
        _LOG.info("router ready at %s", router.address)
        await run_until(stopped, router.tasks)
        _LOG.info("router stops")
    return 0


def relax_garbage_collector() -> None:
    """Make Python's garbage collector scan fewer objects, less often: the last statuses of a thousand workers are 8,000
    objects, and scanning them takes longer than a pairing. Reference counting frees nearly everything anyway.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_MAX_YOUNG_OBJECTS)


@contextlib.asynccontextmanager
async def serving_router(
    settings: RouterSettings, shared_index: LocalityIndex | None = None
) -> AsyncIterator[RouterProcess]:
    """Serve for the time of the block.

    Args:
        shared_index: of all routers and workers; default: that of the Redis in `settings`, if it names one.

    Raises:
        ConfigurationError: a setting cannot be honoured, or an address cannot be listened at.
    """
    clock, metrics = SystemClock(), RouterMetrics()
    spoken_with = (settings.bind, *settings.worker_addresses)
    credentials = settings.credentials(settings.secret, ProcessRole.ROUTER, spoken_with)
    async with contextlib.AsyncExitStack() as opened:
        calibration = Calibration(_FIRST_SPEED)
        fleet = Fleet(settings.limits(), Links(_FIRST_LINK), calibration.speed, credentials.incarnation)
        outliers = Outliers(calibration.speed, OutlierSettings(factor=settings.outlier_factor))
        view = FleetView(fleet, calibration, clock, outliers=outliers, dead_s=settings.dead_after_s)
        registry, discoveries = _open_discoveries(settings, credentials, metrics, opened)
        lookup = _open_lookup(settings, shared_index, opened)
        connect = partial(client_of, credentials=credentials)
        watch = FleetWatch(discoveries, connect, view, lookup.remove_worker, silence_s=settings.dead_after_s)
        pairer = Pairer(fleet, policy_named(settings.policy))
        service = RouterService(view, watch, pairer, lookup, registry, metrics, clock, credentials.incarnation)
        tasks = (asyncio.create_task(watch.run()), asyncio.create_task(_show(metrics, view, lookup)))
        opened.push_async_callback(_end, tasks)
        port = await _open_metrics(settings, metrics, view, opened)
        server = await serve_router(service, settings.bind, credentials)
        opened.push_async_callback(server.stop, settings.grace_s)
        yield RouterProcess(service, server.address, port, tasks)


async def _show(metrics: RouterMetrics, view: FleetView, lookup: PrefixLookup) -> None:
    """Keep the gauges up to date; a scrape must not wait for Redis."""
    while True:
        metrics.show_workers(view.listings())
        try:
            stats = await lookup.stats()
        except LocalityUnavailableError:
            stats = None
        metrics.show_index(stats, lookup.num_unanswered)
        await asyncio.sleep(_GAUGES_INTERVAL_S)


async def _end(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _open_lookup(
    settings: RouterSettings, shared_index: LocalityIndex | None, opened: contextlib.AsyncExitStack
) -> PrefixLookup:
    if shared_index is not None:
        lookup = PrefixLookup(shared_index, is_remote=True)
    elif settings.redis:
        remote = RedisIndex(settings.redis, max_block_replicas=settings.max_block_replicas)
        opened.callback(remote.close)
        lookup = PrefixLookup(remote, is_remote=True)
    else:
        lookup = PrefixLookup(EmbeddedIndex(settings.max_block_replicas), is_remote=False)
    opened.callback(lookup.close)
    return lookup


def _open_discoveries(
    settings: RouterSettings, credentials: Credentials, metrics: RouterMetrics, opened: contextlib.AsyncExitStack
) -> tuple[Discovery | None, list[Discovery]]:
    """Returns (the discovery in which `register` records workers, all discoveries that list workers)."""
    registry = None if settings.redis else EmbeddedDiscovery()
    found: list[Discovery] = [StaticDiscovery(settings.worker_addresses)] if settings.workers else []
    found_by = settings.found_by
    if found_by == "kubernetes":  # NOTE: `register` is answered, for workers to learn of each other; it names nobody
        found.append(_open_kubernetes(settings))
    elif found_by == "redis" and settings.redis:
        found.append(RedisDiscovery(settings.redis, credentials, on_refused=metrics.record_refused))
    elif registry is not None:
        found.append(registry)
    for discovery in found:
        opened.push_async_callback(discovery.close)
    return registry, found


def _open_kubernetes(settings: RouterSettings) -> Discovery:
    from tandem.kube.access import find_access
    from tandem.kube.api import open_api
    from tandem.process.discovery_kubernetes import KubernetesDiscovery

    api = open_api(find_access(os.environ), settings.kubernetes_namespace or "")
    return KubernetesDiscovery(api, settings.kubernetes_selector)


async def _open_metrics(
    settings: RouterSettings, metrics: RouterMetrics, view: FleetView, opened: contextlib.AsyncExitStack
) -> int | None:
    def health() -> tuple[int, dict[str, object]]:
        num_alive = sum(listing.is_alive for listing in view.listings())
        return 200, {"status": "ok", "num_workers": num_alive}

    if settings.metrics_port is None:
        return None
    server = await serve_metrics(metrics.registry, settings.host, settings.metrics_port, health)
    opened.push_async_callback(server.close)
    return server.port
