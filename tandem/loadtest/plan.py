"""Plan of a load test, fixed before it starts. Most fields are flags of `tandem load`, which `cli.load` describes."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tandem.workload.lengths import Lengths
from tandem.workload.slo import Slo

Mode = Literal["closed", "open", "trace"]


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Arrival process: replay of a trace if there is one, else open loop if there is a rate, else closed loop.

    Closed: `concurrency` clients wait `think_time_s` on average after an answer, and for a refusal's `Retry-After` if
    `honour_retry_after`. Open: `rate_per_s` conversations begin each second, spread by `process`.

    Args:
        burstiness: of a bursty process: standard deviation of the times between arrivals, over their mean.
        time_scale: factor for the times of a trace.
        length_scale: factor for the token counts of a trace.
    """

    concurrency: int = 8
    think_time_s: float = 0.0
    honour_retry_after: bool = False
    rate_per_s: float | None = None
    process: Literal["poisson", "bursty", "evenly"] = "poisson"
    burstiness: float = 3.0
    trace: Path | None = None
    time_scale: float = 1.0
    length_scale: float = 1.0

    @property
    def mode(self) -> Mode:
        """Kind of load that these settings describe."""
        if self.trace is not None:
            return "trace"
        return "closed" if self.rate_per_s is None else "open"


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Parameters of a test. Times in seconds, lengths in tokens; None: no limit, or to be detected.

    Args:
        admin_url: address that serves `/admin/workers`.
        token_ids: the first and the last id that prompts are made of.
        num_requests: counted requests, without those of the warm-up.
        max_open: maximum open requests; a further one fails in the client and never delays an open loop.
    """

    url: str
    admin_url: str
    model: str | None
    api_key: str | None
    ready_timeout_s: float
    arrivals: Arrivals
    prompt_lengths: Lengths
    output_lengths: Lengths
    turns: Lengths
    shared_prefix_share: float
    num_prefixes: int
    token_ids: tuple[int, int]
    ignore_eos: bool
    temperature: float
    duration_s: float | None
    num_requests: int | None
    warm_up_s: float
    request_timeout_s: float
    max_open: int
    seed: int
    slo: Slo
    window_s: float
    poll_s: float
