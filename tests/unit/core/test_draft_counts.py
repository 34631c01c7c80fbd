"""Counts of drafts: what follows from the totals by position."""

from tandem.core.draft_counts import DraftCounts


def test_steps_by_tokens_follow_from_acceptance_by_position() -> None:
    """Ten steps: three accepted one draft or more, one of them both."""
    counts = DraftCounts(10, drafted_at=(6, 4), accepted_at=(3, 1))
    assert (counts.num_drafted, counts.num_accepted) == (10, 4)
    assert counts.steps_by_tokens == (7, 2, 1)


def test_without_drafts_every_step_brings_one_token() -> None:
    assert DraftCounts(5).steps_by_tokens == (5,)
