"""Runs one load test, from waiting for the server to the result: connects the other modules, decides nothing itself.

Invariant: however it ends, every task and connection is closed, and the requests sent are reported.
"""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tandem.core.clock import Clock
from tandem.core.errors import ConfigurationError, UnavailableError
from tandem.loadtest.client_cost import CostMeter
from tandem.loadtest.conversations import GeneratedConversation, RecordedConversation, recorded_requests
from tandem.loadtest.driver import Arrival, ClosedDriver, Driver, OpenDriver
from tandem.loadtest.endpoint import GatewayEndpoint, ServerFacts
from tandem.loadtest.plan import LoadPlan
from tandem.loadtest.pool_watch import PoolWatch
from tandem.loadtest.result import LoadResult, sum_up
from tandem.loadtest.token_text import TokenSource
from tandem.workload.arrivals import bursts, evenly, poisson

_LEAD_S = 0.05  # between the last preparation and the first request


@dataclass(frozen=True, slots=True)
class Progress:
    """State of a running test, for display."""

    driver: Driver
    endpoint: GatewayEndpoint
    pools: PoolWatch
    server: ServerFacts


Watcher = Callable[[Progress], contextlib.AbstractAsyncContextManager[None]]


async def run_load_test(
    plan: LoadPlan, clock: Clock, stop: asyncio.Event, context: Mapping[str, Any], watcher: Watcher
) -> LoadResult:
    """Runs a load test; `stop` ends it early, and there is a result all the same.

    Args:
        context: copied into the result.
        watcher: entered when requests begin, left when they have ended.

    Raises:
        UnavailableError: no server is ready in time.
        ConfigurationError: a setting cannot be honoured.
        InvalidRequestError: the trace cannot be read from its start; a later bad line ends the test, with a result.
    """
    endpoint = GatewayEndpoint(plan, clock)
    try:
        facts = await _opened(endpoint, stop)
        driver = make_driver(plan, endpoint, facts)
        pools, meter = PoolWatch(endpoint, plan.poll_s), CostMeter(clock)
        endpoint.begin(clock.now_s() + _LEAD_S + plan.warm_up_s)
        async with watcher(Progress(driver, endpoint, pools, facts)), _running(pools, meter):
            meter.start()
            await driver.run(stop)
            late = [outcome.lateness_s for outcome in driver.outcomes if not outcome.is_warm_up]
            cost = meter.cost(late)
    finally:
        await endpoint.close()
    return sum_up(
        driver.outcomes,
        slo=plan.slo,
        least_duration_s=plan.duration_s or 0.0 if driver.has_lasted else 0.0,
        window_s=plan.window_s,
        was_stopped=stop.is_set() or driver.trace_problem is not None,
        trace_problem=driver.trace_problem,
        pools=pools.samples,
        pools_problem=pools.problem,
        client=cost,
        server=facts,
        context=context,
    )


async def _opened(endpoint: GatewayEndpoint, stop: asyncio.Event) -> ServerFacts:
    """Opens the endpoint. Raises UnavailableError if stopped before it is ready."""
    opening = asyncio.create_task(endpoint.open(), name="open")
    stopped = asyncio.create_task(stop.wait(), name="stop")
    try:
        await asyncio.wait((opening, stopped), return_when=asyncio.FIRST_COMPLETED)
        if not opening.done():
            raise UnavailableError("stopped before the gateway was ready")
        return opening.result()
    finally:
        opening.cancel()
        stopped.cancel()
        await asyncio.gather(opening, stopped, return_exceptions=True)


def make_driver(plan: LoadPlan, endpoint: GatewayEndpoint, facts: ServerFacts) -> Driver:
    """The driver that sends the plan's requests."""
    tokens = TokenSource(*plan.token_ids, plan.seed)

    def generated(number: int) -> GeneratedConversation:
        return GeneratedConversation(plan, tokens, number, facts.max_model_len)

    if plan.arrivals.mode == "closed":
        return ClosedDriver(plan, endpoint, generated)
    if plan.arrivals.mode == "open":
        return OpenDriver(
            plan, endpoint, (Arrival(at_s, generated(number)) for number, at_s in enumerate(_times(plan)))
        )
    return OpenDriver(plan, endpoint, _replay(plan, tokens))


def _times(plan: LoadPlan) -> Iterator[float]:
    rate = plan.arrivals.rate_per_s
    assert rate is not None
    source = random.Random(f"{plan.seed}/arrivals")
    processes: dict[str, Callable[[], Iterator[float]]] = {
        "poisson": lambda: poisson(rate, source),
        "bursty": lambda: bursts(rate, plan.arrivals.burstiness, source),
        "evenly": lambda: evenly(rate),
    }
    return processes[plan.arrivals.process]()


def _replay(plan: LoadPlan, tokens: TokenSource) -> Iterator[Arrival]:
    """Arrivals of a trace. The first request is read at once, so that a missing file is reported before the test."""
    requests = recorded_requests(plan)
    first = next(requests, None)
    if first is None:
        raise ConfigurationError(f"trace={plan.arrivals.trace} has no request")

    def arrivals() -> Iterator[Arrival]:
        yield Arrival(first.arrival_s, RecordedConversation(first, tokens, 0, plan.arrivals.length_scale))
        for number, request in enumerate(requests, 1):
            yield Arrival(request.arrival_s, RecordedConversation(request, tokens, number, plan.arrivals.length_scale))

    return arrivals()


@contextlib.asynccontextmanager
async def _running(pools: PoolWatch, meter: CostMeter) -> AsyncIterator[None]:
    """Runs both watchers during the block."""
    tasks = (asyncio.create_task(pools.watch(), name="pools"), asyncio.create_task(meter.watch(), name="cost"))
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
