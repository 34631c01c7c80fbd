"""Counters of a scheduler, totals since start: preemptions, prompt tokens by origin, decode steps and drafts."""

from dataclasses import dataclass, field

from tandem.core.draft_counts import DraftCounts
from tandem.scheduler.draft_tally import DraftTally


@dataclass(slots=True)
class SchedulerCounters:
    """Totals since start.

    Args:
        num_cached_prompt_tokens: found in the prefix cache.
        num_fetched_tokens: whose KV came from another worker.
        tally: of decodes of one request in one step, and their drafts.
        read_bytes: of KV and other state, read by decodes.
    """

    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_cached_prompt_tokens: int = 0
    num_fetched_tokens: int = 0
    read_bytes: float = 0.0
    tally: DraftTally = field(default_factory=DraftTally)

    @property
    def drafts(self) -> DraftCounts:
        return self.tally.counts

    @property
    def num_decode_steps(self) -> int:
        return self.tally.num_steps

    @property
    def num_drafted(self) -> int:
        return self.drafts.num_drafted

    @property
    def num_accepted(self) -> int:
        return self.drafts.num_accepted
