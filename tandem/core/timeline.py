"""Timeline of a request: the stages that every process adds, in the order they began.

Times are seconds since the Unix epoch, so that stages of several processes line up as well as their clocks agree.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a request in one process.

    Args:
        name: `queue`, `pair`, `prefill`, `prefill chunk`, `fetch`, `transfer`, `first token`, `decode`, …
        process: the worker id (or `router`, `gateway`) it happened in.
        start_s: when it began.
        duration_s: how long it took; 0 for a moment.
        attributes: figures with their units in the name, as `num_tokens`, `num_bytes`, `gb_per_s`.
    """

    name: str
    process: str
    start_s: float
    duration_s: float
    attributes: Mapping[str, str | int | float] = field(default_factory=dict)
