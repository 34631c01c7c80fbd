"""A gateway's parts, put together: what requests share. Started and closed once; owned by one event loop."""

import secrets
from collections.abc import Sequence
from functools import partial

from tandem.core.clock import Clock
from tandem.gateway.admission import Admission
from tandem.gateway.dialect import Limits, Surroundings
from tandem.gateway.directory import ModelDirectory
from tandem.gateway.history import RequestHistory, RequestRecord
from tandem.gateway.journey import Ways
from tandem.gateway.metrics import GatewayMetrics
from tandem.gateway.model import ServedModel
from tandem.gateway.request import ServeRequest
from tandem.gateway.request_ids import RequestIds
from tandem.gateway.routers import RouterListing, Routers
from tandem.gateway.serving import ServeStream
from tandem.gateway.settings import GatewaySettings
from tandem.gateway.settler import Settler
from tandem.gateway.stalls import StallWatch
from tandem.rpc.client import ClientPool, RouterClient, WorkerClient
from tandem.telemetry.tracing import Tracing


class Gateway:
    """Serves requests for one model. `open` is the core that every dialect shares."""

    def __init__(self, settings: GatewaySettings, model: ServedModel, clock: Clock, tracing: Tracing) -> None:
        secret, trace = settings.secret, tracing.metadata
        self._workers = ClientPool(partial(WorkerClient, secret=secret, metadata_source=trace))
        self._router_clients = ClientPool(partial(RouterClient, secret=secret, metadata_source=trace))
        self.routers = Routers(
            settings.router_addresses,
            self._router_clients,
            clock,
            settings.router_timeout_s,
            settings.failover_timeout_s,
        )
        self._stalls = StallWatch(self._workers, clock, settings.silent_after_s, settings.worker_timeout_s)
        self._settler = Settler(self.routers)
        self._open_streams: set[ServeStream] = set()
        self.model = model
        self.tracing = tracing
        self.incarnation = secrets.token_hex(8)
        self.max_body_bytes = int(settings.max_body_mib * 2**20)
        self.request_timeout_s = settings.request_timeout_s
        self.admission = Admission(settings.max_concurrent_requests)
        self.ids = RequestIds()
        self.history = RequestHistory()
        self.metrics = GatewayMetrics(model.name)
        self.directory = ModelDirectory(self.routers, model.name)
        limits = Limits(settings.max_choices, settings.max_messages)
        self.surroundings = Surroundings(model, self.directory, limits)
        self._ways = Ways(
            self.routers,
            self._workers,
            self._stalls,
            self.metrics,
            clock,
            settings.max_attempts,
            settings.failover_timeout_s,
        )

    def start(self) -> None:
        """Begin the background work; call in the event loop."""
        self._stalls.start()
        self._settler.start()
        self.directory.start()

    async def close(self) -> None:
        """End it, and every connection."""
        await self.directory.close()
        await self._settler.close()
        await self._stalls.close()
        await self._workers.close()
        await self._router_clients.close()

    def open(self, request: ServeRequest, record: RequestRecord) -> ServeStream:
        """Serve a request; use as `async with`."""
        return ServeStream(self._ways, self._settler, self._open_streams, request, record)

    def fail_open(self, reason: str) -> None:
        """End every request with an error that its client is told."""
        for stream in tuple(self._open_streams):
            stream.fail(reason)

    async def listings(self) -> Sequence[RouterListing]:
        """What the routers say of the workers."""
        return await self.routers.listings()
