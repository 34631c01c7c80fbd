"""Reports the outcomes of requests to the routers that paired them, in the background.

A router then stops counting the request's load and compares the measured times with its prediction. Invariant: bounded;
while a router is unavailable, reports to it are dropped, and it forgets the requests by itself.
"""

import asyncio
import logging

from tandem.core.errors import TandemError
from tandem.gateway.request import ChoiceEnd
from tandem.gateway.routers import Routers
from tandem.routing.settlement import Settlement

MAX_WAITING = 4096  # outcomes; further ones are dropped
NUM_SENDERS = 4  # tasks

_logger = logging.getLogger(__name__)


class Settler:
    """Queue of outcomes: `add` from the event loop; a few tasks send them."""

    def __init__(self, routers: Routers) -> None:
        self._routers = routers
        self._waiting: asyncio.Queue[tuple[str, Settlement]] = asyncio.Queue(MAX_WAITING)
        self._senders: list[asyncio.Task[None]] = []

    def start(self) -> None:
        self._senders = [asyncio.create_task(self._run(), name="settler") for _ in range(NUM_SENDERS)]

    async def close(self, timeout_s: float = 1.0) -> None:
        """Sends waiting outcomes within `timeout_s`, then stops."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._waiting.join()
        except TimeoutError:
            _logger.warning("%d settlements were not taken by their routers", self._waiting.qsize())
        for sender in self._senders:
            sender.cancel()
        await asyncio.gather(*self._senders, return_exceptions=True)

    def add(self, router: str, settlement: Settlement) -> None:
        """Queues an outcome for the router at this address; drops it if the queue is full."""
        if not self._waiting.full():
            self._waiting.put_nowait((router, settlement))

    async def _run(self) -> None:
        while True:
            router, settlement = await self._waiting.get()
            try:
                await self._routers.settle(router, settlement)
            except TandemError as error:
                _logger.debug("router %s did not take a settlement: %s", router, error)
            finally:
                self._waiting.task_done()


def settlement_of(request_id: str, pairing_id: str, end: ChoiceEnd) -> Settlement:
    """Measured times of a choice in milliseconds; none after a failover, when no single prediction covers them."""
    if end.num_failovers:
        return Settlement(request_id=request_id, pairing_id=pairing_id)
    total_ms: dict[str, float] = {}
    for stage in end.stages:
        total_ms[stage.name] = total_ms.get(stage.name, 0.0) + 1000 * stage.duration_s
    return Settlement(
        request_id=request_id,
        pairing_id=pairing_id,
        queue_ms=total_ms.get("queue"),
        prefill_ms=total_ms.get("prefill"),
        transfer_ms=total_ms.get("transfer"),
        ttft_ms=None if end.ttft_s is None else 1000 * end.ttft_s,
    )
