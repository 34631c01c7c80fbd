"""Counts of drafts: what follows from the totals by position."""

from tandem.core.draft_counts import DraftCounts


def test_steps_by_tokens_follow_from_acceptance_by_position() -> None:
    """Ten steps: three accepted one draft or more, one of them both."""
    counts = DraftCounts(10, drafted_at=(6, 4), accepted_at=(3, 1))
    assert (counts.num_drafted, counts.num_accepted) == (10, 4)
    assert counts.steps_by_tokens == (7, 2, 1)
    assert counts.tokens_per_step == 1.4
    assert counts.by_position == "1: 3 of 6, 2: 1 of 4"


def test_without_drafts_every_step_brings_one_token() -> None:
    assert DraftCounts(5).steps_by_tokens == (5,)
    assert DraftCounts(5).tokens_per_step == 1
    assert DraftCounts().tokens_per_step == 1
    assert DraftCounts(5).by_position == ""


def test_counts_are_added_and_taken_off_by_position() -> None:
    """Workers may have drafted to different positions."""
    few, many = DraftCounts(4, (3,), (2,), 0.5), DraftCounts(10, (6, 4), (3, 1))
    assert few + many == many + few == DraftCounts(14, (9, 4), (5, 1), 0.5)
    assert (few + many).since(few) == DraftCounts(10, (6, 4), (3, 1), 0.0)
    assert few.since(many) == DraftCounts(0, (0, 0), (0, 0), 0.5)
