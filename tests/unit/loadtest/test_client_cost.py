"""A client that was too busy, or was given too little time, says so."""

import asyncio
import time

from tandem.core.clock import SystemClock
from tandem.loadtest.client_cost import CostMeter


def test_an_idle_client_is_not_saturated_by_its_own_work() -> None:
    async def run() -> None:
        meter = CostMeter(SystemClock())
        meter.start()
        await asyncio.wait_for(asyncio.gather(asyncio.sleep(0.2)), 5)
        cost = meter.cost([0.0, 0.001])
        assert cost.cpu_cores < 0.5
        assert not [reason for reason in cost.reasons if "cores" in reason or "sent" in reason]

    asyncio.run(run())


def test_a_client_that_computes_is_busy_and_its_loop_late() -> None:
    async def run() -> None:
        meter = CostMeter(SystemClock())
        watching = asyncio.create_task(meter.watch())
        meter.start()
        await asyncio.sleep(0)
        until_s = time.process_time() + 0.3
        while time.process_time() < until_s:
            pass
        await asyncio.sleep(0.06)
        cost = meter.cost([])
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        assert cost.loop_lag_s is not None
        assert cost.loop_lag_s.maximum > 0.2
        assert cost.is_saturated
        assert any("event loop" in reason for reason in cost.reasons)

    asyncio.run(run())


def test_late_requests_are_a_reason() -> None:
    meter = CostMeter(SystemClock())
    meter.start()
    cost = meter.cost([0.0] * 50 + [0.1] * 50)
    assert any("sent up to 100 ms late" in reason for reason in cost.reasons)
    assert not any("sent" in reason for reason in meter.cost([0.0] * 50).reasons)


def test_a_busy_core_is_a_reason() -> None:
    class Held:
        now = 100.0

        def now_s(self) -> float:
            return self.now

    clock = Held()
    meter = CostMeter(clock)
    meter.start()
    until_s = time.process_time() + 0.05
    while time.process_time() < until_s:
        pass
    clock.now += 0.05
    assert any("cores of the one" in reason for reason in meter.cost([]).reasons)
    clock.now += 10
    assert not meter.cost([]).reasons
