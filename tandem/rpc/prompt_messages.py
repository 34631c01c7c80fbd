"""Names of prompts in calls, so that later ones send only what is new (`told_prompts`). Values only."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ToldPrompt:
    """The name of a call's prompt, and of the one it goes on from.

    Args:
        keeper: random bytes of the caller, which no other process knows.
        keep_as: number under which the whole prompt is kept.
        known: number of a prompt that was kept; None: the call has the whole.
        num_known: tokens of that prompt with which this one begins.
        more_token_ids: those that follow them.
    """

    keeper: bytes
    keep_as: int
    known: int | None = None
    num_known: int = 0
    more_token_ids: Sequence[int] = ()
