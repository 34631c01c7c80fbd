"""Outcome of one request, in seconds since counting began; evaluated by `workload.slo`.

Latency is measured from two times: when the request was due, as its user experiences it, and when it was sent.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from tandem.loadtest.failure import UNFINISHED, Failure
from tandem.workload.slo import Served


@dataclass(frozen=True, slots=True)
class RequestOutcome:
    """Outcome of one request. `failure` is None if it was answered. `turn`: its index in its conversation, from 0.

    Args:
        event_times_s, event_tokens: time of each event with tokens, and number of its tokens. NOTE: as arrays they take
            twelve bytes an event, and a test keeps them all until its end.
    """

    due_s: float
    sent_s: float
    ended_s: float
    num_prompt_tokens: int
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    turn: int = 0
    event_times_s: Sequence[float] = ()
    event_tokens: Sequence[int] = ()
    failure: Failure | None = None
    request_id: str | None = None

    @property
    def is_warm_up(self) -> bool:
        """Whether it was due before counting began."""
        return self.due_s < 0

    @property
    def is_unfinished(self) -> bool:
        """Whether the test was stopped before it was answered."""
        return self.failure is not None and self.failure.kind == UNFINISHED

    @property
    def lateness_s(self) -> float:
        """Seconds after its due time at which the client sent it."""
        return self.sent_s - self.due_s

    @property
    def e2e_s(self) -> float | None:
        """Seconds from its due time to the end of its answer; None if it was not answered."""
        return None if self.failure is not None else self.ended_s - self.due_s

    @property
    def gaps_s(self) -> list[float]:
        """Times between events with tokens."""
        return [after - before for before, after in pairwise(self.event_times_s)]

    def served(self, *, from_send: bool = False) -> Served:
        """The outcome as `workload.slo` takes it, with times from its due time or from its sending."""
        times_s = self.event_times_s
        return Served(
            arrival_s=self.sent_s if from_send else self.due_s,
            first_token_s=times_s[0] if times_s else None,
            finished_s=times_s[-1] if times_s and self.failure is None else None,
            num_output_tokens=self.num_output_tokens,
            rejected=self.failure is not None and self.failure.is_refusal,
        )
