"""Creates and owns the parts of a gateway that its requests share, such as clients of routers and workers.

Started and closed once; owned by one event loop.
"""

import itertools
import logging
from collections.abc import Callable, Sequence
from functools import partial

from tandem.accounts.accounts import Accounts
from tandem.core.clock import Clock
from tandem.core.errors import UnavailableError
from tandem.core.machine import random_bytes
from tandem.core.process_usage import UsageMeter
from tandem.gateway.accounts_open import open_accounts
from tandem.gateway.admission import Admission
from tandem.gateway.body import Bodies
from tandem.gateway.dialect import DialectContext, ParsedRequest, RequestLimits
from tandem.gateway.history import RequestHistory, RequestRecord
from tandem.gateway.journey import JourneyContext
from tandem.gateway.metrics import GatewayMetrics
from tandem.gateway.model import ServedModel
from tandem.gateway.model_info_cache import ModelInfoCache
from tandem.gateway.moderation.choose import choose_moderator
from tandem.gateway.openai.responses.service import ResponseService
from tandem.gateway.pairing_queues import PairingQueues
from tandem.gateway.pin_book import MemoryPinBook, PinBook, PromptPins
from tandem.gateway.pin_book_redis import RedisPinBook
from tandem.gateway.prompt_split import LivePins
from tandem.gateway.request import ServeRequest
from tandem.gateway.request_ids import RequestIds
from tandem.gateway.routers import RouterListing, Routers
from tandem.gateway.serving import ServeStream
from tandem.gateway.settings import GatewaySettings
from tandem.gateway.settler import Settler
from tandem.gateway.stalls import StallWatch
from tandem.rpc.client import ClientPool, RouterClient, WorkerClient
from tandem.rpc.credentials import ProcessRole
from tandem.rpc.prompt_reuse import ReusablePrompts
from tandem.telemetry.tracing import Tracing

_logger = logging.getLogger(__name__)


class Gateway:
    """Serves requests for one model. All dialects serve through `open`."""

    def __init__(
        self,
        settings: GatewaySettings,
        model: ServedModel,
        clock: Clock,
        tracing: Tracing,
        open_accounts: Callable[[GatewaySettings, Clock], Accounts | None] = open_accounts,
    ) -> None:
        self.incarnation, trace = random_bytes(8).hex(), tracing.metadata
        credentials = settings.credentials(
            settings.secret, ProcessRole.GATEWAY, settings.router_addresses, incarnation=self.incarnation
        )
        reusable_prompts = ReusablePrompts()
        connect = partial(WorkerClient, credentials=credentials, metadata_source=trace, prompts=reusable_prompts)
        self._workers = ClientPool(connect)
        connect_router = partial(RouterClient, credentials=credentials, metadata_source=trace, prompts=reusable_prompts)
        self._router_clients = ClientPool(connect_router)
        longest_s = settings.failover_timeout_s / 2  # NOTE: so that a wait has time for several calls
        self.routers = Routers(settings.router_addresses, self._router_clients, settings.router_timeout_s, longest_s)
        self._stalls = StallWatch(self._workers, clock, settings.silent_after_s, settings.worker_timeout_s, longest_s)
        self._settler = Settler(self.routers)
        self._open_streams: set[ServeStream] = set()
        self.model = model
        self.tracing = tracing
        self.bodies = Bodies.for_this_machine(settings.body_limits)
        self.request_timeout_s = settings.request_timeout_s
        self.admission = Admission(settings.max_concurrent_requests)
        self.clock = clock
        self.usage = UsageMeter(clock)
        self.accounts = open_accounts(settings, clock)
        self.moderator = choose_moderator(settings.moderation)
        self.pin_book: PinBook = MemoryPinBook(clock) if settings.redis is None else RedisPinBook(settings.redis)
        stored_mib = settings.stored_responses_mib
        max_stored_bytes = None if stored_mib is None else int(stored_mib * 2**20)
        self.responses = ResponseService.open(settings.redis, settings.responses_keys, max_stored_bytes)
        self.ids = RequestIds()
        self.history = RequestHistory(clock=clock)
        self.metrics = GatewayMetrics(model.name)
        self.model_info = ModelInfoCache(self.routers, model.name, settings.failover_timeout_s)
        self.queues = PairingQueues(settings.room_timeout_s, settings.failover_timeout_s, self.metrics.waiting)
        limits = RequestLimits(settings.max_choices, settings.max_messages)
        self.dialect_context = DialectContext(model, self.model_info, limits)
        self._context = JourneyContext(
            self.routers,
            self._workers,
            self._stalls,
            self.metrics,
            clock,
            settings.max_attempts,
            self.queues,
            map(f"{self.incarnation}-{{}}".format, itertools.count()),
        )

    def start(self) -> None:
        """Starts the background tasks; call in the event loop."""
        if self.accounts is not None:
            self.accounts.start()
        self._stalls.start()
        self._settler.start()
        self.model_info.start()

    async def close(self, drain_s: float = 0.0) -> None:
        """Ends background tasks and connections. `drain_s`: seconds for background responses to finish."""
        await self.responses.close(drain_s)
        self.model.grammars.close()
        self.model.encoder.close()
        await self.model_info.close()
        await self._settler.close()
        await self._stalls.close()
        await self._workers.close()
        await self._router_clients.close()
        await self.pin_book.close()
        if self.moderator is not None:
            await self.moderator.close()
        if self.accounts is not None:
            await self.accounts.close()

    async def passes_moderation(self, request: ServeRequest) -> bool:
        """Whether moderation, if there is any, passes every prompt; raises as `Moderator.judge`."""
        if self.moderator is None:
            return True
        for token_ids in {id(choice.prompt_token_ids): choice.prompt_token_ids for choice in request.choices}.values():
            if not (await self.moderator.judge(self.model.tokenizer.decode(token_ids))).passes:
                return False
        return True

    async def find_pins(self, asked: ParsedRequest) -> PromptPins | None:
        """Looks up which prefixes of the prompt earlier pins keep, and stores that in its results. None: no pins."""
        if not asked.request.pins:
            return None
        pins, live = None, LivePins.of_everything()
        try:
            pins = await PromptPins.look_up(self.pin_book, asked.request, await self.model_info.get())
            live = pins.live
        except UnavailableError as error:
            _logger.warning("request %s is not billed for its pins: %s", asked.request.request_id, error)
        for result in asked.results:
            result.live = live
        return pins

    async def keep_pins(self, pins: PromptPins, asked: ParsedRequest) -> None:
        """Records the pins that the worker granted to a request."""
        try:
            await pins.keep(asked.results[0].granted or ())
        except UnavailableError as error:
            _logger.warning("what request %s has paid for is not noted: %s", asked.request.request_id, error)

    def open(self, request: ServeRequest, record: RequestRecord) -> ServeStream:
        """The stream that serves a request; use as `async with`."""
        return ServeStream(self._context, self._settler, self._open_streams, request, record)

    def fail_open(self, reason: str) -> None:
        """Ends every open request with an error that its client receives."""
        for stream in tuple(self._open_streams):
            stream.fail(reason)

    async def listings(self) -> Sequence[RouterListing]:
        """The workers as every router reports them."""
        return await self.routers.listings()
