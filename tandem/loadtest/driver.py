"""Sends requests when they are due and collects their outcomes, in a closed or an open loop.

Closed: a fixed number of clients, each of which waits for its answers. Open: arrivals at given times. Invariant of an
open loop: the server cannot delay an arrival; delays of the client itself are measured, as the time between a request's
due time and its sending. Ending early cuts open requests and marks them in their outcomes.
"""

import asyncio
import contextlib
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from tandem.core.errors import InvalidRequestError
from tandem.loadtest.conversations import RequestSequence
from tandem.loadtest.endpoint import GatewayEndpoint, RequestResult
from tandem.loadtest.failure import CLIENT_LIMIT, Failure
from tandem.loadtest.load_request import LoadRequest
from tandem.loadtest.outcome import RequestOutcome
from tandem.loadtest.plan import LoadPlan
from tandem.workload.arrivals import ClosedLoop

PAUSE_AFTER_FAILURE_S = 0.1  # NOTE: of a closed loop: a server that refuses in no time would be asked without end
_MAX_RETRY_AFTER_S = 120.0


@dataclass(frozen=True, slots=True)
class Arrival:
    """A conversation and its starting time, in seconds after the beginning of the warm-up."""

    at_s: float
    conversation: RequestSequence


class Driver(ABC):
    """Runs a load once. `outcomes` grows as requests end; `num_open`: open now; `num_sent`: sent so far.

    num_failed: outcomes that are failures.
    has_lasted: requests were sent for the plan's whole duration. trace_problem: why reading the trace stopped early.
    """

    def __init__(self, plan: LoadPlan, endpoint: GatewayEndpoint) -> None:
        self.plan = plan
        self.outcomes: list[RequestOutcome] = []
        self.num_failed = 0
        self.num_open = 0
        self.num_sent = 0
        self.has_lasted = False
        self.trace_problem: str | None = None
        self._endpoint = endpoint
        self._num_counted = 0
        self._is_stopping = False

    async def run(self, stop: asyncio.Event) -> None:
        """Sends everything and waits for every end; when `stop` is set, ends at once."""
        work = asyncio.create_task(self._work(), name="load")
        stopped = asyncio.create_task(stop.wait(), name="stop")
        try:
            await asyncio.wait((work, stopped), return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._is_stopping = True
            self.has_lasted &= not self._was_cut_short(stop.is_set())
            stopped.cancel()
            work.cancel()
            await asyncio.gather(stopped, return_exceptions=True)
            with contextlib.suppress(asyncio.CancelledError):
                await work

    async def _work(self) -> None:
        async with asyncio.TaskGroup() as group:
            try:
                await self._feed(group)
            except InvalidRequestError as error:  # NOTE: a line of the trace; what was sent is still waited for
                if self._is_within(0.0):  # NOTE: else nothing more was to be sent
                    self.trace_problem = str(error)

    @abstractmethod
    async def _feed(self, group: asyncio.TaskGroup) -> None:
        """Starts the tasks that send."""

    def _was_cut_short(self, is_stopped: bool) -> bool:
        """Whether something else than its duration ended it: the number of requests, or `stop` before."""
        plan = self.plan
        has_sent_all = plan.num_requests is not None and self._num_counted >= plan.num_requests
        return has_sent_all or (is_stopped and self._endpoint.now_s() < (plan.duration_s or 0.0))

    def _is_within(self, due_s: float) -> bool:
        """Whether a request that is due at `due_s` should still be sent."""
        plan = self.plan
        if self._is_stopping:
            return False
        if plan.duration_s is not None and due_s >= plan.duration_s:
            self.has_lasted = True
            return False
        return plan.num_requests is None or due_s < 0 or self._num_counted < plan.num_requests

    async def _wait_until(self, due_s: float) -> None:
        """Waits until `due_s`; yields to other tasks even if that has passed."""
        while True:
            wait_s = due_s - self._endpoint.now_s()
            await asyncio.sleep(max(0.0, wait_s))
            if wait_s <= 0:
                return

    def _count(self, due_s: float) -> None:
        self._num_counted += due_s >= 0
        self.num_sent += 1

    async def _send(self, request: LoadRequest, due_s: float) -> RequestResult:
        """Sends one request; call `_count` before."""
        if self.num_open >= self.plan.max_open:
            return self._not_sent(request, due_s)
        self.num_open += 1
        try:
            result = await self._endpoint.send(request, due_s)
        finally:
            self.num_open -= 1
        return self._kept(result)

    def _not_sent(self, request: LoadRequest, due_s: float) -> RequestResult:
        now_s = self._endpoint.now_s()
        failure = Failure(CLIENT_LIMIT, f"{self.num_open} requests were open at once; see --max-open")
        outcome = RequestOutcome(due_s, now_s, now_s, request.prompt.count, turn=request.turn, failure=failure)
        return self._kept(RequestResult(outcome, []))

    def _kept(self, result: RequestResult) -> RequestResult:
        self.outcomes.append(result.outcome)
        self.num_failed += result.outcome.failure is not None
        return result


class ClosedDriver(Driver):
    """Closed loop: a fixed number of clients, each of which sends its next request after an answer.

    Args:
        make: creates the conversation with a given number.
    """

    def __init__(self, plan: LoadPlan, endpoint: GatewayEndpoint, make: Callable[[int], RequestSequence]) -> None:
        super().__init__(plan, endpoint)
        self._conversations: Iterator[RequestSequence] = map(make, iter(range(1 << 62)))

    async def _feed(self, group: asyncio.TaskGroup) -> None:
        for number in range(self.plan.arrivals.concurrency):
            group.create_task(self._client(number), name=f"client-{number}")

    async def _client(self, number: int) -> None:
        zero_s = -self.plan.warm_up_s
        source = random.Random(f"{self.plan.seed}/client/{number}")
        pauses = ClosedLoop(1, self.plan.arrivals.think_time_s, source)
        earliest_s = zero_s
        while True:
            conversation = next(self._conversations)
            request = conversation.next_request(())
            while request is not None:
                pause_s = pauses.next_arrival_s()
                assert pause_s is not None, "a client waits for its own answer only"
                due_s = max(zero_s + pause_s, earliest_s)
                if not self._is_within(due_s):
                    return
                await self._wait_until(due_s)
                if not self._is_within(due_s):
                    return
                self._count(due_s)
                result = await self._send(request, due_s)
                pauses.ended(self._endpoint.now_s() - zero_s)
                if result.outcome.failure is not None:
                    earliest_s = self._endpoint.now_s() + self._pause_after(result.outcome.failure)
                    break
                request = conversation.next_request(result.token_ids)

    def _pause_after(self, failure: Failure) -> float:
        if not self.plan.arrivals.honour_retry_after or failure.retry_after_s is None:
            return PAUSE_AFTER_FAILURE_S
        return min(max(failure.retry_after_s, PAUSE_AFTER_FAILURE_S), _MAX_RETRY_AFTER_S)


class OpenDriver(Driver):
    """Open loop: conversations begin when they are due. Later turns wait for the answer before them, as people do.

    Args:
        arrivals: in the order of their times.
    """

    def __init__(self, plan: LoadPlan, endpoint: GatewayEndpoint, arrivals: Iterable[Arrival]) -> None:
        super().__init__(plan, endpoint)
        self._arrivals = arrivals

    async def _feed(self, group: asyncio.TaskGroup) -> None:
        for arrival in self._arrivals:
            due_s = arrival.at_s - self.plan.warm_up_s
            if not self._is_within(due_s):
                if self.has_lasted and self.plan.duration_s is not None:
                    await self._wait_until(self.plan.duration_s)  # NOTE: quiet seconds are a part of the load
                return
            # NOTE: made before it is due, since making a long prompt takes a while
            request = arrival.conversation.next_request(())
            await self._wait_until(due_s)
            if request is None or not self._is_within(due_s):
                return
            self._count(due_s)
            group.create_task(self._converse(arrival.conversation, request, due_s))

    async def _converse(self, conversation: RequestSequence, first: LoadRequest, due_s: float) -> None:
        source = random.Random(f"{self.plan.seed}/open/{due_s}")
        pauses = ClosedLoop(1, self.plan.arrivals.think_time_s, source)
        pauses.next_arrival_s()  # NOTE: there is no pause before the first
        request: LoadRequest | None = first
        while request is not None:
            result = await self._send(request, due_s)
            if result.outcome.failure is not None:
                return
            pauses.ended(self._endpoint.now_s())
            request = conversation.next_request(result.token_ids)
            due_s = pauses.next_arrival_s() or 0.0
            if request is None or not self._is_within(due_s):
                return
            await self._wait_until(due_s)
            if not self._is_within(due_s):
                return
            self._count(due_s)
