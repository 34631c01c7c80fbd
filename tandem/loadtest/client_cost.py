"""Measures the load of the client's own process, to tell whether it was too busy to measure the server.

Figures: processor time, and the delay of timers in its event loop.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.core.clock import Clock
from tandem.workload.slo import Percentiles, percentiles

BUSY_CORES = 0.8  # of the one core that a client can use
LATE_S = 0.02  # a client that is later than this, or whose timers are, is too busy
_TICK_S = 0.05


@dataclass(frozen=True, slots=True)
class ClientCost:
    """The client's own load during one test. `reasons`: why latencies include waits of the client; empty if they do
    not.

    Args:
        loop_lag_s: delay of timers. lateness_s: delay with which counted requests were sent.
    """

    cpu_cores: float
    loop_lag_s: Percentiles | None
    lateness_s: Percentiles | None
    reasons: Sequence[str]

    @property
    def is_saturated(self) -> bool:
        return bool(self.reasons)

    @property
    def is_busy(self) -> bool:
        """Whether the client used up its core. A client that was late without that was held up by other processes."""
        return self.cpu_cores >= BUSY_CORES


class CostMeter:
    """Measures the client's load."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lags_s: list[float] = []
        self._cpu_s = 0.0
        self._began_s = 0.0

    def start(self) -> None:
        """Starts a new measurement."""
        self._cpu_s, self._began_s = time.process_time(), self._clock.now_s()
        self._lags_s.clear()

    async def watch(self) -> None:
        """Measures the lag of the event loop until cancelled."""
        while True:
            due_s = self._clock.now_s() + _TICK_S
            await asyncio.sleep(_TICK_S)
            self._lags_s.append(max(0.0, self._clock.now_s() - due_s))

    def cost(self, lateness_s: Sequence[float]) -> ClientCost:
        """The client's load since `start`."""
        elapsed_s = max(self._clock.now_s() - self._began_s, 1e-9)
        cores = (time.process_time() - self._cpu_s) / elapsed_s
        lag, late = percentiles(self._lags_s), percentiles(lateness_s)
        return ClientCost(cores, lag, late, tuple(_reasons(cores, lag, late)))


def _reasons(cores: float, lag: Percentiles | None, late: Percentiles | None) -> list[str]:
    found: list[str] = []
    if cores >= BUSY_CORES:
        found.append(f"the client used {cores:.2f} cores of the one it can use")
    if lag is not None and lag.p99 >= LATE_S:
        found.append(f"its event loop was up to {1000 * lag.p99:.0f} ms late (99th percentile)")
    if late is not None and late.p99 >= LATE_S:
        found.append(f"requests were sent up to {1000 * late.p99:.0f} ms late (99th percentile)")
    return found
