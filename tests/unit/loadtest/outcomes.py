"""Outcomes and results made by hand, where every figure is known."""

from array import array
from typing import Any

from tandem.loadtest.client_cost import ClientCost
from tandem.loadtest.endpoint import ServerFacts
from tandem.loadtest.failure import Failure
from tandem.loadtest.outcome import RequestOutcome
from tandem.loadtest.pool_watch import PoolSample
from tandem.loadtest.result import LoadResult, sum_up
from tandem.workload.slo import Slo

REFUSED = Failure("http 429 capacity_exceeded", "full", is_refusal=True)
FAILED = Failure("connection cut", "gone")


def outcome(
    due_s: float, *, late_s: float = 0.0, ttft_s: float = 0.1, tpot_s: float = 0.01, tokens: int = 5, **other: Any
) -> RequestOutcome:
    """Answered, sent `late_s` after it was due, with its first token `ttft_s` after that."""
    first_s = due_s + late_s + ttft_s
    times_s = array("d", [first_s + tpot_s * index for index in range(tokens)])
    values: dict[str, Any] = {
        "due_s": due_s,
        "sent_s": due_s + late_s,
        "ended_s": times_s[-1],
        "num_prompt_tokens": 10,
        "num_cached_tokens": 4,
        "num_output_tokens": tokens,
        "event_times_s": times_s,
        "event_tokens": array("I", [1] * tokens),
    }
    return RequestOutcome(**values | other)


def unanswered(due_s: float, failure: Failure, ended_s: float | None = None) -> RequestOutcome:
    return RequestOutcome(due_s, due_s, due_s + 0.01 if ended_s is None else ended_s, 10, failure=failure)


def result(*outcomes: RequestOutcome, **other: Any) -> LoadResult:
    values: dict[str, Any] = {
        "slo": Slo(0.5, 0.05),
        "least_duration_s": 0.0,
        "window_s": 1.0,
        "was_stopped": False,
        "trace_problem": None,
        "pools": [PoolSample(0.5, "decode", 2, 2, 3, 1, 0.25), PoolSample(1.5, "decode", 3, 3, 3, 0, 0.5)],
        "pools_problem": None,
        "client": ClientCost(0.1, None, None, ()),
        "server": ServerFacts("scripted", 4096, "1.2"),
        "context": {"command": "tandem load"},
    }
    return sum_up(outcomes, **values | other)
