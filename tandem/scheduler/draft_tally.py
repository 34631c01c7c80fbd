"""Running counts of drafted and accepted tokens, of a scheduler or of one request."""

from dataclasses import dataclass, field

from tandem.core.draft_counts import DraftCounts


@dataclass(slots=True)
class DraftTally:
    """Mutable counterpart of `DraftCounts`, with the same fields.

    Args:
        num_steps: decodes of one request in one step.
        drafted_at, accepted_at: drafts by their position in such a decode.
        saved_s: seconds that drafts saved, less those that they cost.
    """

    num_steps: int = 0
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    saved_s: float = 0.0

    @property
    def counts(self) -> DraftCounts:
        return DraftCounts(self.num_steps, tuple(self.drafted_at), tuple(self.accepted_at), self.saved_s)

    def note_decode(self, num_drafts: int, num_accepted: int) -> None:
        """Count one request's decode in a step."""
        self.num_steps += 1
        missing = num_drafts - len(self.drafted_at)
        if missing > 0:
            self.drafted_at += [0] * missing
            self.accepted_at += [0] * missing
        for position in range(num_drafts):
            self.drafted_at[position] += 1
            self.accepted_at[position] += position < num_accepted
