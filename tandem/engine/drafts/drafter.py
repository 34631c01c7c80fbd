"""Drafter: the seam between guessing tokens and checking them."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from tandem.scheduler.output import NewRequest


class Drafter(Protocol):
    """Guesses the next tokens of the requests it was told of. A wrong guess costs time and changes nothing else.

    Called by one thread. Whatever it keeps of a request is gone after `end`, except what it may show to requests of the
    same `hash_root`, which stand for one model, adapter and tenant.
    """

    def begin(self, request: NewRequest) -> None:
        """Follow a request from the tokens that it has."""
        ...

    def extend(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Record the next output tokens of a request, in order."""
        ...

    def draft(self, limits: Mapping[str, int]) -> Mapping[str, Sequence[int]]:
        """Guess what follows. `limits`: the most tokens useful to each request, at least 1. A guess may be shorter, and
        a request left out for which there is none worth checking.
        """
        ...

    def end(self, request_id: str) -> None:
        """Forget a request: it has ended, or will be described again."""
        ...
