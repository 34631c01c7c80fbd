"""Drafter: the seam between guessing tokens and checking them; and what one may read of the checking model."""

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import torch

from tandem.scheduler.output import NewRequest, SchedulerOutput


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


@runtime_checkable
class StateReader(Protocol):
    """The second face of a drafter that guesses from hidden states of the served model.

    `layers`: the layers whose inputs it reads, as in `HiddenStates`.
    """

    @property
    def layers(self) -> tuple[int, ...]: ...

    def observe(self, step: SchedulerOutput, first_tokens: Sequence[int], states: torch.Tensor) -> None:
        """Take the states of a step, of requests that are followed and of others.

        Called after `begin` of its new requests, and before `extend` with the tokens that it chose: so states of drafts
        that turn out to be wrong are among these.

        Args:
            first_tokens: of each scheduled request, its first row in `states`.
            states: [num_tokens, len(layers) * hidden]; nobody changes them later.
        """
        ...
