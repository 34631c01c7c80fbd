"""Interface of drafters, which guess tokens that the served model verifies, and two optional extensions of it.

`StateReader` is for drafters that read the served model's hidden states; `StateCarrier` for those whose state of a
request moves with it to another worker. `Speculation` calls them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from tandem.scheduler.output import NewRequest, SchedulerOutput


class Drafter(Protocol):
    """Guesses the next tokens of the requests given to `begin`. A wrong guess costs time and changes nothing else.

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
        requests without a useful guess may be left out.
        """
        ...

    def end(self, request_id: str) -> None:
        """Forget a request: it has ended, or will be described again."""
        ...


@runtime_checkable
class StateReader(Protocol):
    """Extension of a `Drafter` that guesses from hidden states of the served model: the inputs of its layers `layers`,
    by index; the number of layers stands for the output of the final norm.
    """

    @property
    def layers(self) -> tuple[int, ...]: ...

    def observe(self, step: SchedulerOutput, first_tokens: Sequence[int], states: torch.Tensor) -> None:
        """Take the hidden states of a step's tokens. Its requests include some that this drafter does not follow.

        Called after `begin` of its new requests, and before `extend` with the tokens that it chose: so states of drafts
        that turn out to be wrong are among these.

        Args:
            first_tokens: of each scheduled request, its first row in `states`.
            states: [num_tokens, len(layers) * hidden]; nobody changes them later.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class DraftState:
    """State that a drafter has computed for a request's first tokens, as bytes: `num_rows` rows, the first of position
    `first`.

    Args:
        first: position of its first row.
        num_rows: rows, one a position.
        data: uint8 [num_bytes], on the drafter's device.
    """

    first: int
    num_rows: int
    data: torch.Tensor


@runtime_checkable
class StateCarrier(Protocol):
    """Extension of a `Drafter` whose state of a request can move to another worker, if that one's drafter has an equal
    `fingerprint`. No output token depends on it.

    `fingerprint`: equal where one drafter can go on with the state of the other.
    """

    @property
    def fingerprint(self) -> str: ...

    def give(self, request_id: str) -> DraftState | None:
        """State of all tokens of a request but the newest; computes the part that is pending. None: there is none."""
        ...

    def take(self, request_id: str, state: DraftState) -> None:
        """Use `state` at this request's next `begin`, if it covers all of the request's tokens but the newest."""
        ...

    def forget(self, request_id: str) -> None:
        """Drop a state given to `take` that no `begin` has used."""
        ...
