"""The router's Prometheus metrics, in a registry of their own so that two routers can share a process.

Invariant: labels have few values; request, session and worker ids are never labels.
"""

from collections import Counter as Tally
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from tandem.locality.base import LocalityStats
from tandem.process.heard import SILENT_S
from tandem.rpc.messages import WorkerListing

_DECISION_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1)  # buckets
_ERROR_MS = (-10_000, -3000, -1000, -300, -100, -30, -10, -3, 0, 3, 10, 30, 100, 300, 1000, 3000, 10_000)
_LIFECYCLES = ("starting", "recovering", "draining", "stopped")


class RouterMetrics:
    """Metrics of a router. `registry` is served at `/metrics`."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._decisions = Counter(
            "tandem_router_decisions_total",
            "Requests paired or refused, by outcome",
            ("policy", "outcome"),
            registry=self.registry,
        )
        self._decision_s = Histogram(
            "tandem_router_decision_seconds",
            "Time a decision takes in the router, hashing and the index included",
            buckets=_DECISION_S,
            registry=self.registry,
        )
        self._error_ms = Histogram(
            "tandem_router_prediction_error_ms",
            "Measured minus predicted time to the first token, milliseconds",
            buckets=_ERROR_MS,
            registry=self.registry,
        )
        self._workers = Gauge("tandem_router_workers", "Workers known", ("role", "state"), registry=self.registry)
        self._blocks = Gauge("tandem_index_blocks", "Blocks in the locality index", registry=self.registry)
        self._replicas = Gauge(
            "tandem_index_block_replicas", "Blocks in the locality index, once per holder", registry=self.registry
        )
        self._unavailable = Counter(
            "tandem_index_unavailable_total", "Questions the locality index did not answer", registry=self.registry
        )
        self._refused = Counter(
            "tandem_router_records_refused_total",
            "Records found in Redis that no process of this cluster has sealed; each is counted at every read",
            registry=self.registry,
        )
        self._num_unanswered = 0

    def record_refused(self) -> None:
        """Count one record in Redis that discovery did not accept, because its seal (MAC) is wrong."""
        self._refused.inc()

    def decided(self, policy: str, outcome: str, duration_s: float) -> None:
        """Count a decision: one request was paired (outcome "paired") or refused (outcome = the reason)."""
        self._decisions.labels(policy, outcome).inc()
        self._decision_s.observe(duration_s)

    def settled(self, error_ms: float | None) -> None:
        """Record the prediction error of one request's TTFT, in milliseconds; None: it had no first token."""
        if error_ms is not None:
            self._error_ms.observe(error_ms)

    def show_workers(self, listings: Sequence[WorkerListing]) -> None:
        """Count workers by role and state: their lifecycle, "dead", or "aside" for being slow."""
        tally = Tally((str(listing.status.state.role), _state_of(listing)) for listing in listings)
        self._workers.clear()
        for (role, state), num_workers in tally.items():
            self._workers.labels(role, state).set(num_workers)

    def show_index(self, stats: LocalityStats | None, num_unanswered: int) -> None:
        """Shows the index's size in blocks (None: unknown, the last is kept) and its calls without an answer so far."""
        self._unavailable.inc(num_unanswered - self._num_unanswered)
        self._num_unanswered = num_unanswered
        if stats is not None:
            self._blocks.set(stats.num_blocks)
            self._replicas.set(stats.num_block_replicas)


def _state_of(listing: WorkerListing) -> str:
    lifecycle = listing.status.lifecycle
    if listing.is_alive:
        return lifecycle if listing.slowness is None else "aside"
    is_silent = listing.age_s > SILENT_S or lifecycle == "ready"
    return "dead" if is_silent or lifecycle not in _LIFECYCLES else lifecycle
