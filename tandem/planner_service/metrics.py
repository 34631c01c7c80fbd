"""The planner's Prometheus metrics, in a registry of their own so that two planners can share a process.

Invariant: labels have few values, none of them chosen by clients.
"""

from prometheus_client import CollectorRegistry, Counter, Gauge

from tandem.planner_service.decision import ScalingDecision
from tandem.planner_service.observer import ClusterObservation, MeasuredLatency
from tandem.planning.observation import Outlook

_LATENCIES = ("ttft", "tpot")


class PlannerMetrics:
    """Metrics of a planner. `registry` is what `/metrics` serves."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._wanted = self._gauge("replicas_wanted", "Replicas that the last plan wants", ("pool",))
        self._asked = self._gauge("replicas_asked", "Replicas that are asked for", ("pool",))
        self._ready = self._gauge("replicas_ready", "Workers that take work", ("pool",))
        self._use = self._gauge("predicted_use", "Share of the pool's capacity in use, with the plan", ("pool",))
        self._startup_s = self._gauge("startup_seconds", "Time a replica takes to be ready, as measured", ("pool",))
        self._predicted = self._gauge(
            "predicted_ms", "Predicted latency of the objective's share, milliseconds", ("latency", "replicas")
        )
        self._measured = self._gauge(
            "measured_ms", "Measured latency of the objective's share in the last window, milliseconds", ("latency",)
        )
        self._mean = self._gauge(
            "measured_mean_ms", "Measured mean latency of the last window, milliseconds", ("latency",)
        )
        self._error = self._gauge(
            "prediction_error_ms",
            "Measured latency minus what was predicted a window before, milliseconds",
            ("latency",),
        )
        self._rate = self._gauge("requests_per_second", "Requests that arrived in the last window", ())
        self._unseen = self._gauge("problems", "Things that could not be seen at the last look", ())
        self._leader = self._gauge("leader", "1 while this planner may act", ())
        self._decisions = Counter(
            "tandem_planner_decisions_total",
            "Decisions for a pool by what they change and what became of them",
            ("pool", "change", "outcome"),
            registry=self.registry,
        )
        self._looks = Counter(
            "tandem_planner_looks_total",
            "Looks at the cluster, by whether a plan followed",
            ("result",),
            registry=self.registry,
        )

    def record_observation(self, observed: ClusterObservation, is_leader: bool) -> None:
        """Records one observation."""
        self._leader.set(is_leader)
        self._unseen.set(len(observed.problems))
        self._looks.labels("blind" if observed.observation is None else "planned").inc()
        for name, latency in zip(_LATENCIES, (observed.ttft, observed.tpot), strict=True):
            self._show_latency(name, latency)
        if observed.observation is None:
            return
        traffic = observed.observation.traffic
        self._rate.set(traffic.num_requests / traffic.duration_s)
        for pool, state in (("prefill", observed.observation.prefill), ("decode", observed.observation.decode)):
            self._ready.labels(pool).set(state.num_ready)
            if state.startup_s is not None:
                self._startup_s.labels(pool).set(state.startup_s)

    def record_decision(self, decision: ScalingDecision) -> None:
        """Records one plan and the actions taken."""
        plan = decision.plan
        for action in decision.actions:
            self._wanted.labels(action.pool).set(action.num_planned)
            self._asked.labels(action.pool).set(action.num_asked)
            self._decisions.labels(action.pool, _change(action.num_before, action.num_planned), action.outcome).inc()
        if plan.now is not None:
            self._predict("now", plan.now)
        if plan.then is not None:
            self._predict("then", plan.then)
            self._use.labels("prefill").set(plan.then.prefill_use)
            self._use.labels("decode").set(plan.then.decode_use)
        for name, error_ms in zip(_LATENCIES, (decision.ttft_error_ms, decision.tpot_error_ms), strict=True):
            if error_ms is not None:
                self._error.labels(name).set(error_ms)

    def _show_latency(self, name: str, latency: MeasuredLatency) -> None:
        """NOTE: a window without measurements keeps the last value, since no traffic is no improvement."""
        if latency.share_ms is not None:
            self._measured.labels(name).set(latency.share_ms)
        if latency.mean_ms is not None:
            self._mean.labels(name).set(latency.mean_ms)

    def _predict(self, replicas: str, outlook: Outlook) -> None:
        self._predicted.labels("ttft", replicas).set(outlook.ttft_ms)
        self._predicted.labels("tpot", replicas).set(outlook.tpot_ms)

    def _gauge(self, name: str, meaning: str, labels: tuple[str, ...]) -> Gauge:
        return Gauge(f"tandem_planner_{name}", meaning, labels, registry=self.registry)


def _change(num_before: int, num_planned: int) -> str:
    if num_planned == num_before:
        return "stay"
    return "grow" if num_planned > num_before else "shrink"
