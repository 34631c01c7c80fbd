"""Counters of a scheduler."""

from dataclasses import dataclass


@dataclass(slots=True)
class SchedulerCounters:
    """Totals since start.

    num_drafted, num_accepted: drafts computed, and those of them that equalled the token chosen.
    """

    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_cached_prompt_tokens: int = 0
    num_fetched_tokens: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
