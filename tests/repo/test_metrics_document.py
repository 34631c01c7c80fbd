"""`docs/metrics.md` has every metric that a process exports, with its labels and what its own help says of it."""

import os
from collections.abc import Iterator
from pathlib import Path

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

from tandem.gateway.metrics import GatewayMetrics
from tandem.planner_service.metrics import PlannerMetrics
from tandem.router.metrics import RouterMetrics
from tandem.telemetry.engine_metrics import WorkerMetrics

UPDATE = "TANDEM_UPDATE_GOLDEN"
DOCUMENT = Path(__file__).parents[2] / "docs" / "metrics.md"
BEGIN, END = "<!-- metrics: begin -->\n", "<!-- metrics: end -->\n"


def _registries() -> dict[str, CollectorRegistry]:
    workers = CollectorRegistry()
    WorkerMetrics(workers, "demo")
    return {
        "Gateway": GatewayMetrics("demo").registry,
        "Router": RouterMetrics().registry,
        "Worker": workers,
        "Planner": PlannerMetrics().registry,
    }


def _labels(registry: CollectorRegistry, family: Metric) -> list[str]:
    """Labels but those that all metrics of that name have: as declared, or else as shown."""
    declared = [getattr(each, "_labelnames", ()) for each in registry._collector_to_names if _is(each, family)]
    shown = {label for sample in family.samples for label in sample.labels} - {"le"}
    found = declared[0] if declared else sorted(shown)
    return [label for label in found if label not in ("model_name", "engine")]


def _is(collector: object, family: Metric) -> bool:
    return getattr(collector, "_name", None) == family.name


def _rows(registry: CollectorRegistry) -> Iterator[str]:
    yield "| name | labels | kind | meaning |\n|---|---|---|---|\n"
    for family in registry.collect():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = ", ".join(f"`{label}`" for label in _labels(registry, family))
        yield f"| `{name}` | {labels} | {family.type} | {family.documentation} |\n"


def test_every_metric_is_in_the_document() -> None:
    tables = "\n".join(f"## {process}\n\n{''.join(_rows(registry))}" for process, registry in _registries().items())
    before, found = DOCUMENT.read_text().split(BEGIN)
    if os.environ.get(UPDATE):
        DOCUMENT.write_text(f"{before}{BEGIN}\n{tables}\n{END}")
        found = DOCUMENT.read_text().split(BEGIN)[1]
    assert found == f"\n{tables}\n{END}", f"run with {UPDATE}=1"
