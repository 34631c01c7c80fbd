"""Drafter: the seam between guessing tokens and checking them; what one may read of the checking model, and what of it
moves from one worker to another.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True, eq=False)
class DraftState:
    """State that a drafter has computed for a request's first tokens.

    first: position of its first row.
    num_rows: rows, one a position.
    data: uint8 [num_bytes], on the drafter's device.
    """

    first: int
    num_rows: int
    data: torch.Tensor


@runtime_checkable
class StateCarrier(Protocol):
    """The third face of a drafter, one whose state of a request goes on at another worker. No token depends on it.

    `fingerprint`: equal where one drafter can go on with the state of the other.
    """

    @property
    def fingerprint(self) -> str: ...

    def give(self, request_id: str) -> DraftState | None:
        """State of all tokens of a request but the newest; computes what of it is pending. None: there is none."""
        ...

    def take(self, request_id: str, state: DraftState) -> None:
        """Begin this request, at the next `begin` of it, with `state` if it is of all its tokens but the newest."""
        ...

    def forget(self, request_id: str) -> None:
        """Drop what `take` was given and no `begin` has used."""
        ...
