"""Counters of a scheduler."""

from dataclasses import dataclass, field

from tandem.core.draft_counts import DraftCounts


@dataclass(slots=True)
class SchedulerCounters:
    """Totals since start.

    num_decode_steps, drafted_at, accepted_at, saved_s: as in `DraftCounts`. read_bytes: of state, by decode steps.
    """

    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_cached_prompt_tokens: int = 0
    num_fetched_tokens: int = 0
    read_bytes: float = 0.0
    num_decode_steps: int = 0
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    saved_s: float = 0.0

    @property
    def drafts(self) -> DraftCounts:
        return DraftCounts(self.num_decode_steps, tuple(self.drafted_at), tuple(self.accepted_at), self.saved_s)

    @property
    def num_drafted(self) -> int:
        return sum(self.drafted_at)

    @property
    def num_accepted(self) -> int:
        return sum(self.accepted_at)

    def note_decode(self, num_drafts: int, num_accepted: int) -> None:
        """Count one request's decode in a step."""
        self.num_decode_steps += 1
        missing = num_drafts - len(self.drafted_at)
        if missing > 0:
            self.drafted_at += [0] * missing
            self.accepted_at += [0] * missing
        for position in range(num_drafts):
            self.drafted_at[position] += 1
            self.accepted_at[position] += position < num_accepted
