"""Record of one plan with its observation and the actions taken, for logs, metrics and /plan. Values only."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from tandem.planner_service.actuator import Action
from tandem.planner_service.observer import ClusterObservation
from tandem.planning.observation import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingDecision:
    """One plan, its observation and its actions. `ttft_error_ms`, `tpot_error_ms`: measured latency minus that
    predicted by the previous plan; None if one is missing.
    """

    observed: ClusterObservation
    plan: Plan
    actions: tuple[Action, ...]
    is_leader: bool
    ttft_error_ms: float | None = None
    tpot_error_ms: float | None = None

    @property
    def words(self) -> str:
        """The decision in one line."""
        return "; ".join([*map(_in_words, self.actions), self.plan.reason])


def error_ms(measured_ms: float | None, predicted_ms: float | None) -> float | None:
    """Measured minus predicted; None if either is unknown or not finite."""
    if measured_ms is None or predicted_ms is None or not math.isfinite(predicted_ms):
        return None
    return measured_ms - predicted_ms


def as_json(value: Any) -> Any:
    """Converts to JSON values: dataclasses to objects, and numbers that JSON lacks to the strings "inf" and "nan"."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: as_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [as_json(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _in_words(action: Action) -> str:
    count = f"{action.pool} {action.num_before}"
    if action.num_planned != action.num_before:
        count += f" -> {action.num_planned}"
    return f"{count} ({action.outcome}{': ' + action.note if action.note else ''})"
