"""Planners on nodes: production's process, with Kubernetes in memory, and gateways' metrics read over simulated
streams.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest

from tandem.core.machine import wall_s
from tandem.kube.api import KubeApi
from tandem.planner_service.process import Planner, running_planner
from tandem.planner_service.settings import PlannerSettings
from tandem.simulation.fabric import Fabric
from tandem.simulation.kubernetes import NAMESPACE, SimulatedKubernetes, SimulatedKubeTransport
from tandem.simulation.model import MODEL
from tandem.simulation.node import Node
from tandem.simulation.scaling import INTERVAL_S, LEASE, LEASE_S, MAX_STEP, Scaling

METRICS_PORT = 9000
_BORN = b"tandem_gateway_arrivals_created{"


class MetricsSession(asyncio.Protocol):
    """Gateway's end of a connection by which a planner reads its metrics."""

    def __init__(self, registry: CollectorRegistry, born_s: float) -> None:
        self._registry, self._born_s = registry, born_s
        self._received = bytearray()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        self._received += data
        if self._received.endswith(b"\r\n\r\n"):
            self._transport.write(b"HTTP/1.0 200 OK\r\n\r\n" + self._page())
            self._transport.close()

    def _page(self) -> bytes:
        """The metrics page. NOTE: creation times of counters, taken from the real machine's clock, are replaced."""
        lines = generate_latest(self._registry).split(b"\n")
        return b"\n".join(
            line.rpartition(b" ")[0] + b" %f" % self._born_s if line.startswith(_BORN) else line for line in lines
        )


def born_now(registry: CollectorRegistry) -> "_MetricsListener":
    """Factory of metrics sessions for a gateway that starts now, as its counters' creation times will say."""
    return _MetricsListener(registry, wall_s())


class _MetricsListener:
    def __init__(self, registry: CollectorRegistry, born_s: float) -> None:
        self._registry, self._born_s = registry, born_s

    def __call__(self) -> MetricsSession:
        return MetricsSession(self._registry, self._born_s)


@contextlib.asynccontextmanager
async def serving_simulated_planner(
    settings: PlannerSettings, kubernetes: SimulatedKubernetes, fabric: Fabric, node: Node
) -> AsyncIterator[Planner]:
    """Runs a planner for the time of the block, by `planner_service.process.running_planner`."""
    api = KubeApi(SimulatedKubeTransport(kubernetes, fabric, node), NAMESPACE)
    async with running_planner(settings, api=api) as planner:
        yield planner


def planner_settings(
    scaling: Scaling, name: str, routers: str, gateways: tuple[str, ...], trust: dict[str, Any]
) -> PlannerSettings:
    """Settings of the planner `name`. `trust`: secret and certificates."""
    options: dict[str, Any] = {
        "mode": "act",
        "planner_id": name,
        "interval_s": INTERVAL_S,
        "routers": routers,
        "gateways": ",".join(f"{gateway}:{METRICS_PORT}" for gateway in gateways),
        "served_model_name": MODEL,
        "max_prefill": scaling.max_prefill,
        "max_decode": scaling.max_decode,
        "max_accelerators": scaling.budget,
        "max_step_up": MAX_STEP,
        "max_step_down": MAX_STEP,
        "hold_s": scaling.hold_s,
        "yield_s": 2.0,
        "startup_s": scaling.startup_s,
        "warmup_s": 0.0,
        "ttft_ms": scaling.ttft_ms,
        "tpot_ms": scaling.tpot_ms,
        "prefill_deployment": "prefill",
        "decode_deployment": "decode",
        "prefill_selector": "role=prefill",
        "decode_selector": "role=decode",
        "lease_name": LEASE,
        "lease_s": LEASE_S,
        "metrics_port": None,
        **trust,
    }
    return PlannerSettings(**options)
