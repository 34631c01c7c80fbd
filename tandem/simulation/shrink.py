"""Makes a failing scenario smaller: leaves out faults and requests for as long as it still fails."""

from collections.abc import Callable
from dataclasses import replace

from tandem.simulation.scenario import Scenario


def shrunk(scenario: Scenario, fails: Callable[[Scenario], bool], max_runs: int = 200) -> Scenario:
    """The smallest scenario found that `fails`, which `scenario` does: halves first, then one by one.

    Args:
        max_runs: maximum number of calls of `fails`.
    """
    num_runs = 0
    for field in ("faults", "asks"):
        size = max(1, len(getattr(scenario, field)) // 2)
        while size:
            start = 0
            while start < len(getattr(scenario, field)):
                if num_runs >= max_runs:
                    return scenario
                items = getattr(scenario, field)
                smaller = replace(scenario, **{field: items[:start] + items[start + size :]})
                num_runs += 1
                if fails(smaller):
                    scenario = smaller
                else:
                    start += size
            size //= 2
    return scenario
