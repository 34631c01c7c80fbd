"""Gateways as the planner sees them: the real counters behind a real HTTP server, without anything being served."""

import contextlib
from collections.abc import AsyncIterator

from tandem.core.output import RequestMetrics
from tandem.core.types import FinishReason
from tandem.gateway.metrics import GatewayMetrics
from tandem.gateway.request import ChoiceEnd
from tandem.planner_service.gateway_counts import GatewayCounts, parse_counts
from tandem.telemetry.metrics_server import MetricsServer, serve_metrics


class FakeGateway:
    """Counts what it is told; its life begins when it is made."""

    def __init__(self) -> None:
        self.metrics = GatewayMetrics("m")

    def serve(
        self,
        num_prompt: int = 100,
        num_cached: int = 0,
        num_output: int = 11,
        ttft_s: float = 0.2,
        tpot_s: float = 0.02,
    ) -> None:
        """One request that came and ended well."""
        self.arrive(num_prompt)
        self.metrics.observe_first(ttft_s)
        metrics = RequestMetrics(0.0, 0.0, ttft_s, ttft_s, num_prompt, num_output, num_cached, 0)
        self._end(FinishReason.LENGTH, num_prompt, num_output, ttft_s, ttft_s + (num_output - 1) * tpot_s, metrics)

    def arrive(self, num_prompt: int = 100) -> None:
        """One request that came and has not ended."""
        self.metrics.observe_arrival(num_prompt)

    def refuse(self, num_prompt: int = 100, num_choices: int = 1) -> None:
        """One request that a router refused."""
        for _ in range(num_choices):
            self.arrive(num_prompt)
            self._end(FinishReason.ERROR, num_prompt, 0, None, 0.1, None)
        self.metrics.rejected("capacity_exceeded", 429, has_arrived=True)

    def turn_away(self, code: str = "capacity_exceeded") -> None:
        """One request that the gateway itself refused, before it knew its length."""
        self.metrics.rejected(code, 429, has_arrived=False)

    def counts(self) -> GatewayCounts:
        return parse_counts(self.metrics.text().decode())

    def _end(
        self,
        reason: FinishReason,
        num_prompt: int,
        num_output: int,
        ttft_s: float | None,
        duration_s: float,
        metrics: RequestMetrics | None,
    ) -> None:
        end = ChoiceEnd(
            index=0,
            reason=reason,
            num_prompt_tokens=num_prompt,
            num_output_tokens=num_output,
            num_failovers=0,
            ttft_s=ttft_s,
            metrics=metrics,
            tpot_s=None if ttft_s is None or num_output < 2 else (duration_s - ttft_s) / (num_output - 1),
            duration_s=duration_s,
        )
        self.metrics.observe_end(end)


@contextlib.asynccontextmanager
async def serving(gateway: FakeGateway, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[MetricsServer]:
    """`gateway`'s /metrics over HTTP for the time of the block."""
    server = await serve_metrics(gateway.metrics.registry, host, port, lambda: (200, {}))
    try:
        yield server
    finally:
        await server.close()
