"""Life cycle of a planner process: creates the parts from settings and runs until told to stop.

Invariant: everything opened is closed in reverse order, even if starting fails half-way, and the lease is released.
"""

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from tandem.core.clock import SystemClock
from tandem.core.errors import ConfigurationError
from tandem.core.machine import wall_s
from tandem.kube.access import find_access
from tandem.kube.api import KubeApi, open_api
from tandem.kube.candidate import LeaseTerms
from tandem.kube.leader import LeaderElection, own_identity
from tandem.planner_service.actuator import Actuator
from tandem.planner_service.control_loop import ControlLoop
from tandem.planner_service.kubernetes import GatewayPods, KubernetesTargets, PoolName
from tandem.planner_service.listed_workers import ListedWorkers
from tandem.planner_service.metrics import PlannerMetrics
from tandem.planner_service.observer import Observer
from tandem.planner_service.plan_server import PlanServer
from tandem.planner_service.policy import bounds_of, guessed_speeds, policy_of
from tandem.planner_service.scrape import GatewayScraper
from tandem.planner_service.settings import PlannerSettings
from tandem.planner_service.targets import Adviser, Leadership, NoTargets, Pool, ScaleTargets
from tandem.planner_service.workers import WorkerWatch
from tandem.planning.observation import ScalingPolicy
from tandem.process.signals import run_until, stop_event
from tandem.rpc.credentials import ProcessRole
from tandem.telemetry.log import configure_logging

_LOG = logging.getLogger(__name__)
_MOST_WRITE_S = 5.0


@dataclass(frozen=True, slots=True)
class Planner:
    """A running planner. `metrics_port` is None if there is no server; `tasks` never end on their own."""

    loop: ControlLoop
    leadership: Leadership
    metrics_port: int | None
    tasks: tuple[asyncio.Task[None], ...]


def run_planner(settings: PlannerSettings) -> int:
    """Runs the planner until SIGTERM or SIGINT; returns the exit code."""
    configure_logging(settings.log_level, settings.log_format, "planner")
    return asyncio.run(_run(settings))


async def _run(settings: PlannerSettings) -> int:
    stopped = stop_event()
    async with running_planner(settings) as planner:
        _LOG.info("planner ready: %s every %g s", settings.mode, settings.interval_s)
        await run_until(stopped, planner.tasks)
        _LOG.info("planner stops")
    return 0


@contextlib.asynccontextmanager
async def running_planner(
    settings: PlannerSettings, policy: ScalingPolicy | None = None, api: KubeApi | None = None
) -> AsyncIterator[Planner]:
    """Runs a planner for the duration of the block.

    Args:
        policy: scaling policy; default: the one from the settings.
        api: the Kubernetes API, closed by the caller; default: that of this process's environment, if it is needed.

    Raises:
        ConfigurationError: a setting cannot be honoured, or an address cannot be bound.
    """
    clock, metrics = SystemClock(), PlannerMetrics()
    async with contextlib.AsyncExitStack() as opened:
        api = api or _open_api(settings, opened)
        targets, leadership = _targets(settings, api), _leadership(settings, api)
        credentials = settings.credentials(settings.secret, ProcessRole.PLANNER, settings.router_addresses)
        workers = WorkerWatch(
            ListedWorkers(settings.router_addresses, credentials, settings.served_model_name),
            clock,
            credentials,
            warmup_s=settings.warmup_s,
            priors=guessed_speeds(settings),
        )
        find = (
            None if api is None or not settings.gateway_selector else GatewayPods(api, settings.gateway_selector).find
        )
        observer = Observer(
            GatewayScraper(settings.gateway_addresses, find),
            workers,
            targets,
            clock,
            wall_s,
            max_running=settings.max_num_running,
            share=settings.slo_share,
        )
        actuator = Actuator(
            targets,
            leadership,
            bounds_of(settings),
            clock,
            acts=settings.mode == "act",
            yield_s=settings.yield_s,
            write_timeout_s=write_timeout_s(settings),
        )
        loop = ControlLoop(
            observer,
            policy or policy_of(settings),
            actuator,
            leadership,
            metrics,
            clock,
            interval_s=settings.interval_s,
            mode=settings.mode,
        )
        port = await _serve(settings, metrics, loop, opened)
        tasks = [asyncio.create_task(workers.run(), name="workers"), asyncio.create_task(loop.run(), name="rounds")]
        if settings.mode == "act":
            tasks.append(asyncio.create_task(leadership.run(), name="leadership"))
        opened.push_async_callback(_end, tasks)
        yield Planner(loop, leadership, port, tuple(tasks))


def _open_api(settings: PlannerSettings, opened: contextlib.AsyncExitStack) -> KubeApi | None:
    if not settings.needs_kubernetes:
        return None
    api = open_api(find_access(os.environ), settings.kubernetes_namespace or "")
    opened.push_async_callback(api.close)
    return api


def _targets(settings: PlannerSettings, api: KubeApi | None) -> ScaleTargets:
    if api is None or settings.prefill_deployment is None or settings.decode_deployment is None:
        return NoTargets()
    return KubernetesTargets(
        api,
        {
            Pool.PREFILL: PoolName(settings.prefill_deployment, settings.prefill_selector),
            Pool.DECODE: PoolName(settings.decode_deployment, settings.decode_selector),
        },
    )


def _leadership(settings: PlannerSettings, api: KubeApi | None) -> Leadership:
    if settings.mode != "act":
        return Adviser()
    if api is None:
        raise ConfigurationError("mode='act' needs prefill_deployment and decode_deployment; or use mode=advise")
    identity = own_identity(settings.planner_id or socket.gethostname())
    return LeaderElection(api, settings.lease_name, identity, lease_terms(settings))


def lease_terms(settings: PlannerSettings) -> LeaseTerms:
    """Durations of the leader lease, in the proportions used by Kubernetes' own controllers."""
    return LeaseTerms(
        lease_s=settings.lease_s, renew_deadline_s=settings.lease_s * 2 / 3, retry_s=settings.lease_s * 2 / 15
    )


def write_timeout_s(settings: PlannerSettings) -> float:
    """Timeout of a write, such that one started at the renew deadline ends before another planner can lead."""
    terms = lease_terms(settings)
    return min(_MOST_WRITE_S, 0.9 * (terms.lease_s - terms.renew_deadline_s))


async def _serve(
    settings: PlannerSettings, metrics: PlannerMetrics, loop: ControlLoop, opened: contextlib.AsyncExitStack
) -> int | None:
    if settings.metrics_port is None:
        return None
    server = PlanServer(metrics.registry, loop.health, loop.page)
    await server.start(settings.host, settings.metrics_port)
    opened.push_async_callback(server.close)
    return server.port


async def _end(tasks: Sequence[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
