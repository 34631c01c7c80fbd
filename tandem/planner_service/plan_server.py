"""Server of /plan beside /metrics and /health: the last decision as JSON, for operators and tests."""

import json
from collections.abc import Callable, Mapping

from prometheus_client import CollectorRegistry

from tandem.telemetry.metrics_server import Health, MetricsServer

_CLIENT_TIMEOUT_S = 5.0


class PlanServer(MetricsServer):
    """Metrics server with the additional page /plan. `page` is called in the event loop and must not block."""

    def __init__(self, registry: CollectorRegistry, health: Health, page: Callable[[], Mapping[str, object]]) -> None:
        super().__init__(registry, health, _CLIENT_TIMEOUT_S)
        self._plan = page

    def _page(self, path: bytes, with_body: bool) -> bytes:
        if path != b"/plan":
            return super()._page(path, with_body)
        body = json.dumps(self._plan(), allow_nan=False).encode()
        head = (
            "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        return head.encode() + (body if with_body else b"")
