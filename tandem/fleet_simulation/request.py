"""One request in the simulated fleet, and the times that it has reached."""

from dataclasses import dataclass

from tandem.routing.snapshot import RequestShape
from tandem.workload.slo import Served
from tandem.workload.trace import TraceRequest


@dataclass(slots=True)
class SimulatedRequest:
    """State of a request. `recorded`: as it is in the trace; `shape`: as the router sees it. `num_reserved_blocks`: KV
    blocks at its decode worker. Times are None until they are reached.
    """

    request_id: str
    recorded: TraceRequest
    shape: RequestShape
    num_reserved_blocks: int = 0
    first_token_s: float | None = None
    finished_s: float | None = None
    rejected: bool = False

    def served(self) -> Served:
        return Served(
            arrival_s=self.recorded.arrival_s,
            first_token_s=self.first_token_s,
            finished_s=self.finished_s,
            num_output_tokens=self.recorded.num_output_tokens if self.finished_s is not None else 0,
            rejected=self.rejected,
        )
